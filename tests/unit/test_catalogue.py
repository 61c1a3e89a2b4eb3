"""Where labs are found: the catalogue's names, and files of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from netlab import catalogue, spec
from netlab.errors import UsageError


def test_every_file_of_the_catalogue_is_found_by_its_name() -> None:
    files = catalogue.paths()
    assert files
    for file in files:
        assert catalogue.find(file.stem) == file
        assert spec.load(file).name == file.stem


def test_every_lab_of_the_catalogue_is_right_in_all_its_variants() -> None:
    for file in catalogue.paths():
        labs = spec.load_all(file)
        assert list(labs) == ["base", *labs["base"].variants]
        for lab in labs.values():
            assert lab.expect
            assert all(entry.why for entry in lab.expect)


@pytest.mark.parametrize("name", ["./lab.yaml", "labs/lab.yaml", "lab.yaml", "lab.yml", "/a/lab"])
def test_a_path_is_a_path(name: str) -> None:
    assert catalogue.find(name) == Path(name)


def test_an_unknown_name_tells_the_nearest_and_all() -> None:
    with pytest.raises(UsageError) as caught:
        catalogue.find("calico-mcvlan")
    said = str(caught.value)
    assert "(did you mean 'calico-macvlan'?)" in said
    assert all(file.stem in said for file in catalogue.paths())
    assert "./lab.yaml" in said


def test_an_installed_package_has_its_labs_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "netlab"
    (package / "labs").mkdir(parents=True)
    (package / "labs" / "inside.yaml").touch()
    monkeypatch.setattr(catalogue, "_PACKAGE", package)
    assert catalogue.find("inside") == package / "labs" / "inside.yaml"
