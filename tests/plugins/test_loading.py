"""Loading one plugin: what is imported when, and what each way of being broken gets."""

from __future__ import annotations

import sys
import threading

import pytest

from commlayer.backend import PLUGIN_API
from commlayer.errors import CommError, ErrorKind
from commlayer.registry import Registry


def refused(registry: Registry, name: str) -> CommError:
    with pytest.raises(CommError) as caught:
        registry.load(name)
    error = caught.value
    assert error.kind is ErrorKind.PLUGIN
    assert repr(name) in error.operation
    assert error.cure
    return error


def test_listing_imports_nothing_and_loading_imports_one(site):
    first = site.install("acme-first", site.plugin("first"), "first")
    second = site.install("acme-second", site.plugin("second"), "second")
    registry = Registry()
    assert {"first", "second"} <= set(registry.names())
    assert not {first, second} & set(sys.modules)

    loaded = registry.load("first")
    assert loaded.backend.name == "first"
    assert (loaded.distribution, loaded.version) == ("acme-first", "1.0")
    assert first in sys.modules
    assert second not in sys.modules
    assert registry.load("first") is loaded


def test_distribution_installed_meanwhile_is_found(site):
    registry = Registry()
    refused(registry, "late")
    site.install("acme-late", site.plugin("late"), "late")
    assert registry.load("late").backend.name == "late"


def test_several_threads_load_it_once(site):
    source = site.plugin("slow").replace(
        "    return Example()", "    CALLS.append(1); time.sleep(0.05)\n    return Example()"
    )
    site.install("acme-slow", f"import time\nCALLS = []\n{source}", "slow")
    registry, barrier, found = Registry(), threading.Barrier(4), []

    def load() -> None:
        barrier.wait()
        found.append(registry.load("slow"))

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [loaded is found[0] for loaded in found] == [True] * 4
    assert sys.modules["acme_slow"].CALLS == [1]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import absent_dependency", "No module named 'absent_dependency'"),
        ("raise RuntimeError('no driver')", "RuntimeError: no driver"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def broken(:", "SyntaxError"),
    ],
)
def test_import_that_fails_names_distribution_version_and_cause(site, source, expected):
    site.install("acme-broken", source, "broken", version="2.3")
    error = refused(Registry(), "broken")
    assert "acme-broken 2.3" in error.cause
    assert expected in error.cause
    assert "acme-broken" in error.cure
    assert error.__cause__ is not None


def test_plugin_repaired_meanwhile_loads(site, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    site.install("acme-mended", "raise ValueError('not yet')", "mended")
    registry = Registry()
    refused(registry, "mended")
    (site.path / "acme_mended.py").write_text(site.plugin("mended"))
    assert registry.load("mended").backend.name == "mended"


@pytest.mark.parametrize(
    "source",
    ["", "def commlayer_backend(): return None", "from commlayer.hooks import hookimpl"],
)
def test_missing_hook_is_named(site, source):
    site.install("acme-bare", source, "bare")
    error = refused(Registry(), "bare")
    assert "acme-bare 1.0" in error.cause
    assert "commlayer_backend" in error.cause
    assert "hookimpl" in error.cure


def test_hook_with_unknown_arguments_is_refused(site):
    source = site.plugin("odd").replace("commlayer_backend()", "commlayer_backend(surprise)")
    site.install("acme-odd", source, "odd")
    error = refused(Registry(), "odd")
    assert "acme-odd" in error.cause
    assert "surprise" in error.cause


def test_hook_that_raises_is_refused(site):
    source = site.plugin("angry").replace("return Example()", "raise OSError('no device')")
    site.install("acme-angry", source, "angry")
    assert "OSError: no device" in refused(Registry(), "angry").cause


@pytest.mark.parametrize("returned", ["None", "'text'", "Example"])
def test_wrong_return_type_is_refused(site, returned):
    source = site.plugin("wrong").replace("return Example()", f"return {returned}")
    site.install("acme-wrong", source, "wrong")
    error = refused(Registry(), "wrong")
    assert "acme-wrong 1.0" in error.cause
    assert "commlayer.backend.Backend" in error.cause


def test_backend_that_lacks_a_method_is_refused(site):
    source = site.plugin("partial").replace("def open", "def opened")
    site.install("acme-partial", source, "partial")
    assert "open" in refused(Registry(), "partial").cause


def test_name_other_than_the_entry_point_is_refused(site):
    site.install("acme-alias", site.plugin("real"), "alias")
    error = refused(Registry(), "alias")
    assert "'real'" in error.cause
    assert "'alias'" in error.cause


def test_plugin_for_a_newer_interface_asks_for_a_newer_commlayer(site):
    site.install("acme-new", site.plugin("new", plugin_api=(PLUGIN_API + 1, PLUGIN_API + 2)), "new")
    error = refused(Registry(), "new")
    assert f"plugin API {PLUGIN_API + 1} to {PLUGIN_API + 2}" in error.cause
    assert f"has {PLUGIN_API}" in error.cause
    assert error.cure == "Upgrade commlayer"


def test_plugin_for_an_older_interface_asks_for_a_newer_plugin(site):
    site.install("acme-old", site.plugin("old", plugin_api=(0, PLUGIN_API - 1)), "old")
    assert refused(Registry(), "old").cure == "Upgrade acme-old"


@pytest.mark.parametrize("low", [0, PLUGIN_API])
@pytest.mark.parametrize("high", [PLUGIN_API, 99])
def test_interface_inside_the_range_is_accepted(site, low, high):
    site.install("acme-range", site.plugin("range", plugin_api=(low, high)), "range")
    assert Registry().load("range").backend.plugin_api == (low, high)


@pytest.mark.parametrize("declared", [1, (1,), ("1", "2"), None])
def test_malformed_range_is_refused(site, declared):
    site.install("acme-odd", site.plugin("odd", plugin_api=declared), "odd")
    assert "plugin_api" in refused(Registry(), "odd").cause


@pytest.mark.parametrize(
    ("line", "expected"),
    [("semantics = Semantics()", "semantics"), ("priority = 0", "priority")],
)
def test_malformed_declaration_is_refused(site, line, expected):
    source = site.plugin("bad").replace(line, f"{expected} = 'high'")
    site.install("acme-bad", source, "bad")
    assert f"{expected} 'high'" in refused(Registry(), "bad").cause


def test_two_distributions_with_one_name_are_both_named(site):
    first = site.install("acme-one", site.plugin("same"), "same")
    second = site.install("acme-two", site.plugin("same"), "same", version="2.0")
    site.install("acme-other", site.plugin("other"), "other")
    error = refused(Registry(), "same")
    assert "acme-one 1.0" in error.cause
    assert "acme-two 2.0" in error.cause
    assert not {first, second} & set(sys.modules)
    assert Registry().load("other").backend.name == "other"


def test_distribution_found_twice_on_the_path_counts_once(site, tmp_path, monkeypatch):
    site.install("acme-twice", site.plugin("twice"), "twice")
    again = tmp_path / "again"
    again.mkdir()
    type(site)(again).install("acme-twice", site.plugin("twice"), "twice", version="0.9")
    monkeypatch.syspath_prepend(again)
    assert Registry().load("twice").version in ("0.9", "1.0")


def test_unknown_name_gets_near_miss_list_and_install_line(site):
    site.install("acme-first", site.plugin("first"), "first")
    error = refused(Registry(site.entry_points()), "frist")
    assert "Did you mean 'first'?" in error.cure
    assert "Installed backends: first." in error.cure
    assert "pip install" not in error.cure, "a misspelt name is no distribution"
    error = refused(Registry(site.entry_points()), "other")
    assert "pip install commlayer-other" in error.cure


def test_unreadable_metadata_hides_nobody(site, caplog):
    site.metadata("acme-garbled", "[commlayer.backends]\nno equals sign\n")
    site.install("acme-first", site.plugin("first"), "first")
    assert Registry().load("first").backend.name == "first"
    assert "acme-garbled" in caplog.text


def test_distribution_without_a_name_is_tolerated(site):
    site.install("acme-first", site.plugin("first"), "first")
    next(site.path.glob("*.dist-info/METADATA")).unlink()
    loaded = Registry(site.entry_points()).load("first")
    assert loaded.backend.name == "first"
