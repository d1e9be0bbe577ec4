"""An inference engine's own pages in GPU memory: shared by CUDA IPC, copied by the GPU worker.

Doors: `page_kernels` (the copies), `cuda_ipc` (sharing), `page_messages` (what daemon and worker
say). CuPy is imported when something is called.
"""
