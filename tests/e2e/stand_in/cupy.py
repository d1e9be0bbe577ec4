"""CuPy's place on the path of a daemon under test: GPU memory that is host memory."""

from hicache.bench.gpu.stand_in import StandIn

__version__ = "stand-in"
cuda = StandIn().cuda
