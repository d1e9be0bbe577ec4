"""No module name and no class name stands twice in the product."""

from collections import defaultdict

from tests.architecture.product import FILES

# A file here bears the name of its operation, of its command or of its benchmark: `warm` is all
# three. One file elsewhere may bear that name too.
NAMED_FOR_A_VERB = (
    "hicache/bench/",
    "hicache/commands/",
    "hicache/daemon/operations/",
    "engine/requests/",
)
MODULES: dict[str, str] = {
    "catalog": "the table of what its package has: tiers, eviction policies",
}
CLASSES: dict[str, str] = {}


def test_no_module_name_twice() -> None:
    places = defaultdict(list)
    for file in FILES:
        is_named = file.path.name not in ("__init__.py", "__main__.py")
        if is_named and not file.name.startswith(NAMED_FOR_A_VERB):
            places[file.path.stem].append(file.name)
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert set(twice) == set(MODULES), twice
    for folder in NAMED_FOR_A_VERB:
        stems = [file.path.stem for file in FILES if file.name.startswith(folder)]
        plain = [stem for stem in stems if not stem.startswith("__")]
        assert len(plain) == len(set(plain)), folder


def test_no_class_name_twice() -> None:
    places = defaultdict(set)
    for file in FILES:
        for cls in file.classes():
            places[cls.name].add(file.name)
    twice = {name: sorted(files) for name, files in places.items() if len(files) > 1}
    assert set(twice) == set(CLASSES), twice
