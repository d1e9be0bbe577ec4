"""For every test: on a busy machine an example may take as long as it takes."""

from hypothesis import HealthCheck, settings

settings.register_profile("hicache", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hicache")
