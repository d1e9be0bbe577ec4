// Between an inference engine's pages and our blocks: many pages of all layers in one launch.
//
//   plane p   |page 0|page 1|page 2|…      at plane_base[p], pages plane_stride[p] bytes apart
//   block b   |p0 page|p0 page|p1 page|…   at block_base[b], planes one after the other, and in a
//                                          plane the block's pages in the order of page_of[b, :]
//
// A warp copies one tile at a time, a part of one page: neighbouring lanes take neighbouring units,
// and all loads of a tile are under way before its first store. The grid may be of any size, so the
// caller says how many SMs this takes from the inference engine's own kernels. No shared memory, no
// synchronisation: threads are independent, and the same source runs on a CPU one by one
// (kernels_on_cpu.cpp). NVRTC compiles this file as it stands: it includes nothing.

typedef unsigned long long u64;

#define LANES 32u
#define DEPTH 8u

template <typename Unit>
__device__ void copy_pages(const u64 *plane_base, const u64 *plane_stride, const u64 *block_base,
                           const int *page_of, unsigned num_planes, unsigned pages_per_block,
                           unsigned num_blocks, unsigned page_bytes, int to_blocks) {
    const unsigned page_units = page_bytes / (unsigned)sizeof(Unit);
    const unsigned tile_units = LANES * DEPTH;
    const unsigned tiles_per_page = (page_units + tile_units - 1) / tile_units;
    const unsigned pages_in_block = num_planes * pages_per_block;
    const unsigned num_tiles = num_blocks * pages_in_block * tiles_per_page;  // < 2^31: page_kernels.py
    const unsigned warps = blockDim.x / LANES;
    const unsigned lane = threadIdx.x % LANES;

    for (unsigned tile = blockIdx.x * warps + threadIdx.x / LANES; tile < num_tiles;
         tile += gridDim.x * warps) {
        const unsigned chunk = tile / tiles_per_page;  // one page of one plane of one block
        const unsigned block = chunk / pages_in_block;
        const unsigned within = chunk % pages_in_block;
        const unsigned plane = within / pages_per_block;
        const u64 number = (u64)page_of[(u64)block * pages_per_block + within % pages_per_block];

        Unit *page = (Unit *)(plane_base[plane] + number * plane_stride[plane]);
        Unit *slot = (Unit *)(block_base[block] + (u64)within * page_bytes);
        const Unit *from = to_blocks ? page : slot;
        Unit *to = to_blocks ? slot : page;

        const unsigned first = tile % tiles_per_page * tile_units + lane;
        Unit held[DEPTH];
#pragma unroll
        for (unsigned i = 0; i < DEPTH; i++)
            if (first + i * LANES < page_units) held[i] = __ldcs(from + first + i * LANES);
#pragma unroll
        for (unsigned i = 0; i < DEPTH; i++)
            if (first + i * LANES < page_units) __stcs(to + first + i * LANES, held[i]);
    }
}

#define KERNEL(name, Unit)                                                                        \
    extern "C" __global__ void name(const u64 *plane_base, const u64 *plane_stride,               \
                                    const u64 *block_base, const int *page_of,                    \
                                    unsigned num_planes, unsigned pages_per_block,                \
                                    unsigned num_blocks, unsigned page_bytes, int to_blocks) {    \
        copy_pages<Unit>(plane_base, plane_stride, block_base, page_of, num_planes,               \
                         pages_per_block, num_blocks, page_bytes, to_blocks);                     \
    }

KERNEL(copy_pages_16, uint4)
KERNEL(copy_pages_4, unsigned int)
KERNEL(copy_pages_1, unsigned char)
