// kernels.cu on a CPU, a thread at a time in a shuffled order: for tests of its index arithmetic.

struct Dim {
    unsigned x;
};
static Dim threadIdx, blockIdx, blockDim, gridDim;

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
template <typename T> static T __ldcs(const T *from) { return *from; }
template <typename T> static void __stcs(T *to, T held) { *to = held; }

#define __device__ static
#define __global__
#include "kernels.cu"

extern "C" void run(const char *name, unsigned grid, unsigned threads, const u64 *plane_base,
                    const u64 *plane_stride, const u64 *block_base, const int *page_of,
                    unsigned num_planes, unsigned pages_per_block, unsigned num_blocks,
                    unsigned page_bytes, int to_blocks) {
    gridDim.x = grid, blockDim.x = threads;
    const u64 total = (u64)grid * threads;
    for (u64 n = 0; n < total; n++) {
        const u64 thread = n * 7919 % total;  // a prime larger than any grid here: each thread once
        blockIdx.x = thread / threads, threadIdx.x = thread % threads;
        const char last = name[__builtin_strlen(name) - 1];
        (last == '6' ? copy_pages_16 : last == '4' ? copy_pages_4 : copy_pages_1)(
            plane_base, plane_stride, block_base, page_of, num_planes, pages_per_block, num_blocks,
            page_bytes, to_blocks);
    }
}
