"""An inference engine's own pages in GPU memory: shared by CUDA IPC, copied by the GPU worker.

Doors: `page_kernels` (the copies), `cuda_ipc` (sharing), `page_messages` (between daemon and
worker). CuPy is imported only by calls that need it.
"""
