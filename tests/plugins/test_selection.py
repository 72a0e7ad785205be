"""Choosing among plugins: by name, by priority, and past broken ones."""

from __future__ import annotations

import logging
import sys

import pytest

from commlayer.errors import CommError, ErrorKind
from commlayer.registry import Registry

UNVIABLE = "return Viability(False, 'no such card', 'fit one')"


def refused(site, name: str) -> CommError:
    with pytest.raises(CommError) as caught:
        Registry(site.entry_points()).select(name)
    assert caught.value.kind is ErrorKind.PLUGIN
    return caught.value


def entry(site, name: str):
    (found,) = [e for e in Registry(site.entry_points()).survey() if e.name == name]
    return found


def test_by_name_imports_no_other(site):
    broken = site.install("acme-broken", "raise RuntimeError", "broken")
    site.install("acme-good", site.plugin("good"), "good")
    assert Registry(site.entry_points()).select("good").backend.name == "good"
    assert broken not in sys.modules


def test_unviable_by_name_says_why_and_what_to_do(site):
    site.install("acme-card", site.plugin("card", viability=UNVIABLE), "card")
    error = refused(site, "card")
    assert "acme-card 1.0" in error.cause
    assert "no such card" in error.cause
    assert error.cure == "fit one"


@pytest.mark.parametrize(
    ("viability", "reason"),
    [
        ("raise OSError('driver crashed')", "OSError: driver crashed"),
        ("return True", "not a Viability"),
    ],
)
def test_viability_that_raises_or_lies_is_unviable(site, viability, reason):
    site.install("acme-odd", site.plugin("odd", viability=viability), "odd")
    assert reason in refused(site, "odd").cause
    assert reason in entry(site, "odd").reason
    assert not entry(site, "odd").viable


def test_auto_takes_the_viable_one_of_highest_priority(site, caplog):
    site.install("acme-low", site.plugin("low", priority=1), "low")
    site.install("acme-high", site.plugin("high", priority=2), "high")
    site.install("acme-best", site.plugin("best", priority=3, viability=UNVIABLE), "best")
    with caplog.at_level(logging.INFO, logger="commlayer"):
        assert Registry(site.entry_points()).select("auto").backend.name == "high"
    assert "'high' (acme-high 1.0) selected: viable (always), priority 2" in caplog.text
    assert "'low' not selected: priority 1" in caplog.text
    assert "'best' not selected: no such card" in caplog.text


def test_auto_breaks_ties_by_name(site):
    for name in ("b", "a", "c"):
        site.install(f"acme-{name}", site.plugin(name), name)
    assert Registry(site.entry_points()).select("auto").backend.name == "a"


def test_auto_passes_over_broken_and_ambiguous_plugins_with_a_warning(site, caplog):
    site.install("acme-broken", "import absent_dependency", "broken")
    site.install("acme-one", site.plugin("same", priority=9), "same")
    site.install("acme-two", site.plugin("same", priority=9), "same")
    site.install("acme-good", site.plugin("good"), "good")
    assert Registry(site.entry_points()).select("auto").backend.name == "good"
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert any("'broken'" in text and "absent_dependency" in text for text in warnings)
    assert any("'same'" in text and "acme-two" in text for text in warnings)


def test_auto_without_a_viable_one_lists_each_reason(site):
    site.install("acme-card", site.plugin("card", viability=UNVIABLE), "card")
    site.install("acme-broken", "raise RuntimeError('half installed')", "broken")
    error = refused(site, "auto")
    assert "card: no such card" in error.cause
    assert "half installed" in error.cause
    assert "card: fit one" in error.cure


def test_auto_without_any_says_how_to_install_one(site):
    assert "pip install" in refused(site, "auto").cure


def test_survey_shows_every_problem(site):
    site.install("acme-good", site.plugin("good", priority=4, plugin_api=(1, 3)), "good")
    site.install("acme-broken", "import absent_dependency", "broken", version="0.2")
    site.install("acme-one", site.plugin("same"), "same")
    site.install("acme-two", site.plugin("same"), "same")
    good, broken, same = (entry(site, name) for name in ("good", "broken", "same"))
    assert (good.viable, good.reason, good.priority) == (True, "always", 4)
    assert (good.distribution, good.version, good.plugin_api) == ("acme-good", "1.0", (1, 3))
    assert (broken.viable, broken.loaded, broken.version) == (False, None, "0.2")
    assert "absent_dependency" in broken.reason
    assert "acme-broken" in broken.install
    assert not same.viable
    assert "acme-one 1.0" in same.reason
    assert "acme-two 1.0" in same.reason
