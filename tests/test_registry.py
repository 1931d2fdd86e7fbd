from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from milepost import registry as registry_module
from milepost.components import NoOptions
from milepost.errors import ConfigError, PluginError, Problem
from milepost.registry import Registry, current, resolve, use
from plugin_site import Site, model, reward, states


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    made = Site(folder)
    yield made
    for module in made.modules:
        sys.modules.pop(module, None)


@pytest.fixture
def process_registry() -> Iterator[Callable[[Registry | None], None]]:
    before = registry_module._current
    yield use
    use(before)


def test_a_component_is_found_with_its_provenance(site: Site) -> None:
    site.install("Acme.Rewards", {"fixed": reward("constant")}, version="1.2")
    registry = site.load()
    item = registry.get("reward", "constant")
    assert (item.kind, item.name, item.plugin) == ("reward", "constant", "fixed")
    assert (item.distribution, item.version, item.origin) == ("Acme.Rewards", "1.2", "Acme.Rewards 1.2")
    assert registry.names("reward") == ["constant"]
    assert registry.provided("reward") == [item]
    assert registry.names("algorithm") == []
    (record,) = registry.plugins
    assert (record.name, record.state, record.components, record.error) == ("fixed", "ok", (item,), "")
    assert registry.distributions() == {"acme-rewards": "1.2"}
    with pytest.raises(FrozenInstanceError):
        item.version = "2"  # type: ignore[misc]


def test_without_discover_the_installed_environment_is_read(site: Site) -> None:
    site.install("acme", {"acme_only_here": reward("acme_only_here")})
    registry = Registry.load()
    assert registry.get("reward", "acme_only_here").distribution == "acme"
    assert registry.get("algorithm", "grpo").distribution == "milepost"


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import a_module_that_is_not_there", "ModuleNotFoundError: No module named 'a_module_that_is_not_there'"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("class Panic(BaseException): pass\nraise Panic('at the disco')", "Panic: at the disco"),
        ("def f(:", "SyntaxError"),
        (
            "import milepost\n@milepost.hookimpl\ndef milepost_rewards():\n    raise SystemExit('late')",
            "SystemExit: late",
        ),
        ("import milepost\n@milepost.hookimpl\ndef milepost_rewards():\n    yield 1 / 0", "ZeroDivisionError"),
    ],
)
def test_what_a_plugin_raises_stays_with_it(site: Site, source: str, error: str) -> None:
    site.install("broken-one", {"bad": source})
    site.install("good-one", {"good": reward("good")})
    registry = site.load()
    assert states(registry) == {"broken-one:bad": "broken", "good-one:good": "ok"}
    bad = registry.plugins[0]
    assert error in bad.error
    assert "Traceback" in bad.traceback
    assert bad.components == ()
    assert registry.names("reward") == ["good"]
    assert registry.distributions() == {"good-one": "1.0"}


@pytest.mark.parametrize("place", ["module", "hook"])
def test_keyboard_interrupt_comes_through(site: Site, place: str) -> None:
    body = "raise KeyboardInterrupt"
    hook = f"import milepost\n@milepost.hookimpl\ndef milepost_rewards():\n    {body}"
    site.install("acme", {"slow": body if place == "module" else hook})
    with pytest.raises(KeyboardInterrupt):
        site.load()


HEAD = """
import milepost
from milepost.components import *
from pydantic import BaseModel, ConfigDict, Field, AliasChoices
def build(options): return None
def reward(name="r", options=milepost.NoOptions, traits=RewardTraits(), build=build, summary="A reward."):
    return milepost.Component(name, options, traits, build, summary)
@milepost.hookimpl
"""


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("def milepost_rewards(): return None", r"milepost_rewards\(\) returned None .*expected an iterable of"),
        ("def milepost_rewards(): return reward()", "returned Component"),
        ("def milepost_rewards(): return 'abc'", "returned 'abc'"),
        ("def milepost_rewards(): return {'r': reward()}", "returned {'r'"),
        ("def milepost_rewards(): return [reward]", r"an iterable holding <function reward.*\(function\)"),
        ("def milepost_rewards(): return [reward(name='')]", "component named ''"),
        ("def milepost_rewards(): return [reward(name='a:b')]", "component named 'a:b'"),
        ("def milepost_rewards(): return [reward(), reward()]", "reward 'r' is returned twice"),
        ("def milepost_rewards(): return [reward(options=dict)]", "options are the class dict; expected a pydantic"),
        ("def milepost_rewards(): return [reward(options=milepost.NoOptions())]", "options are NoOptions"),
        ("def milepost_rewards(): return [reward(traits=AlgorithmTraits())]", "expected a milepost.*RewardTraits"),
        ("def milepost_rewards(): return [reward(build=None)]", "build is None"),
        ("def milepost_rewards(): return [reward(summary=' ')]", "summary is ' '"),
        ("def milepost_rewards(unexpected): return []", "unexpected"),
        ("def milepost_rewardz(): return []", "unknown hook 'milepost_rewardz'"),
        (
            "def milepost_rewards():\n    class Loose(BaseModel): x: int = 0\n    return [reward(options=Loose)]",
            "options model Loose would take unknown keys",
        ),
        (
            "def milepost_rewards():\n"
            "    class O(milepost.Options): timeout: float = 1.0\n"
            "    return [reward(options=O)]",
            "option 'timeout' of O is a key of the kernel's own.*rename it.*taken: error_budget, memory_gb, name",
        ),
        (
            "def milepost_rewards():\n"
            "    class O(milepost.Options): limit: float = Field(1.0, alias='timeout')\n"
            "    return [reward(options=O)]",
            "option 'timeout' of O is a key of the kernel's own",
        ),
        (
            "def milepost_rewards():\n"
            "    class O(milepost.Options): n: int = Field(1, validation_alias=AliasChoices('count', 'workers'))\n"
            "    return [reward(options=O)]",
            "option 'workers' of O is a key of the kernel's own",
        ),
        (
            "def milepost_models(): return [milepost.Component('m', milepost.NoOptions, "
            "ModelTraits('Qwen3ForCausalLM', None, None), build, 'x')]",
            "architectures are 'Qwen3ForCausalLM'; expected a tuple",
        ),
        (
            "def milepost_models():\n    traits = ModelTraits(('A',), None, None)\n"
            "    return [milepost.Component(n, milepost.NoOptions, traits, build, 'x') for n in 'mn']",
            "models 'm' and 'n' both serve 'A'",
        ),
    ],
)
def test_a_mistake_surfaces_at_load_and_names_its_author(site: Site, source: str, error: str) -> None:
    site.install("acme", {"mistaken": HEAD + source})
    site.install("other", {"fine": reward("fine")})
    registry = site.load()
    assert states(registry) == {"acme:mistaken": "broken", "other:fine": "ok"}
    with pytest.raises(PluginError, match=rf"(?s)plugin 'mistaken' from acme 1.0 did not load.*{error}"):
        registry.get("reward", "mistaken")


@pytest.mark.parametrize("wrapper", ["wrapper=True", "hookwrapper=True"])
def test_hook_wrappers_are_rejected(site: Site, wrapper: str) -> None:
    source = f"import milepost\n@milepost.hookimpl({wrapper})\ndef milepost_rewards():\n    yield\n    return []"
    site.install("acme", {"wrapping": source})
    (record,) = site.load().plugins
    assert record.state == "broken"
    assert record.error.startswith("milepost_rewards is a hook wrapper")


def test_a_forgotten_decorator_and_an_empty_module_are_told_apart(site: Site) -> None:
    site.install("acme", {"bare": "def milepost_rewards():\n    return []", "empty": "x = 1"})
    bare, empty = site.load().plugins
    assert bare.error == "milepost_rewards is not marked as a hook; put @milepost.hookimpl above it"
    assert "implements no hook; expected at least one of milepost_algorithms" in empty.error


def test_two_distributions_may_use_one_entry_point_name(site: Site) -> None:
    site.install("acme", {"rewards": reward("a")})
    site.install("bolt", {"rewards": reward("b")})
    registry = site.load()
    assert states(registry) == {"acme:rewards": "ok", "bolt:rewards": "ok"}
    assert registry.names("reward") == ["a", "b"]


def test_a_name_claimed_twice_belongs_to_nobody_until_one_is_blocked(site: Site) -> None:
    site.install("acme", {"good": reward("good")})
    site.install("bolt_rewards", {"good": reward("good"), "fine": reward("fine")}, version="2.0")
    registry = site.load()
    assert states(registry) == {
        "acme:good": "conflicting",
        "bolt_rewards:good": "conflicting",
        "bolt_rewards:fine": "ok",
    }
    assert registry.names("reward") == ["fine"]
    with pytest.raises(PluginError) as caught:
        registry.get("reward", "good")
    assert str(caught.value) == (
        "reward 'good' is provided by plugin 'good' from acme 1.0 and plugin 'good' from bolt_rewards 2.0; neither is "
        "used. Block the other to choose: --block acme:good or --block bolt_rewards:good (or plugins.block in a run "
        "config)."
    )
    assert registry.plugins[0].error == str(caught.value)

    for spelling in ("bolt_rewards:good", "Bolt-Rewards:good", "bolt.rewards:good"):
        chosen = site.load(block=[spelling])
        assert chosen.get("reward", "good").distribution == "acme"
        assert states(chosen)["bolt_rewards:good"] == "blocked"
        assert chosen.warnings == ()


def test_one_name_may_stand_for_components_of_two_kinds(site: Site) -> None:
    site.install("acme", {"rewards": reward("same"), "models": model("same", "A")})
    registry = site.load()
    assert registry.get("reward", "same").plugin == "rewards"
    assert registry.get("model", "same").plugin == "models"


def test_recipes_are_found_by_architecture(site: Site) -> None:
    site.install("acme", {"mine": model("mine", "MyForCausalLM", "MyMoeForCausalLM"), "any": model("any", "*")})
    registry = site.load()
    assert registry.for_architecture("MyMoeForCausalLM").name == "mine"
    assert registry.for_architecture("OtherForCausalLM").name == "any"
    assert registry.for_architecture("MyForCausalLM", override="any").name == "any"
    with pytest.raises(PluginError, match=r"unknown model 'mien'.*did you mean 'mine'"):
        registry.for_architecture("MyForCausalLM", override="mien")
    without = site.load(block=["any"])
    with pytest.raises(PluginError, match=r"unknown architecture 'MyForCausalLn'.*did you mean 'MyForCausalLM'"):
        without.for_architecture("MyForCausalLn")


def test_two_recipes_of_one_architecture_conflict_and_no_fallback_steps_in(site: Site) -> None:
    site.install("acme", {"ours": model("ours", "A", "B")})
    site.install("bolt", {"theirs": model("theirs", "A"), "any": model("any", "*")})
    registry = site.load()
    assert states(registry) == {"acme:ours": "conflicting", "bolt:theirs": "conflicting", "bolt:any": "ok"}
    with pytest.raises(
        PluginError, match=r"'A' is served by plugin 'ours' from acme 1.0 and plugin 'theirs'.*--block"
    ) as e:
        registry.for_architecture("A")
    assert str(e.value).endswith("Or name one of them: model.recipe: ours | theirs.")
    assert registry.for_architecture("B").name == "ours"
    assert registry.for_architecture("A", override="theirs").distribution == "bolt"
    assert site.load(block=["acme:ours"]).for_architecture("A").name == "theirs"


def test_two_fallback_recipes_conflict(site: Site) -> None:
    site.install("acme", {"x": model("x", "*")})
    site.install("bolt", {"y": model("y", "*")})
    with pytest.raises(PluginError, match=r"every other architecture is served by plugin 'x'.*and plugin 'y'"):
        site.load().for_architecture("A")


def test_a_recipe_whose_name_is_disputed_is_not_handed_out_by_architecture(site: Site) -> None:
    site.install("acme", {"m": model("m", "A")})
    site.install("bolt", {"m": model("m", "B")})
    with pytest.raises(PluginError, match="model 'm' is provided by"):
        site.load().for_architecture("A")


def test_blocking_comes_before_importing(site: Site, tmp_path: Path) -> None:
    trace = tmp_path / "imported"
    site.install("acme", {"loud": f"open({str(trace)!r}, 'w').close()\n" + textwrap.dedent(reward("loud"))})
    registry = site.load(block=["loud"])
    assert not trace.exists()
    assert states(registry) == {"acme:loud": "blocked"}
    assert registry.distributions() == {}
    with pytest.raises(PluginError, match=r"plugin 'loud' from acme 1.0 is blocked; take it out"):
        registry.get("reward", "loud")
    site.load()
    assert trace.exists()


def test_blocking_what_is_not_installed_warns(site: Site) -> None:
    site.install("acme", {"good": reward("good")})
    registry = site.load(block=["goood", "acne:good"])
    assert registry.names("reward") == ["good"]
    assert registry.warnings == (
        "blocked plugin 'goood' is not installed, so blocking it does nothing; did you mean 'good'?",
        "blocked plugin 'acne:good' is not installed, so blocking it does nothing; did you mean 'acme:good'?",
    )


def test_an_unknown_name_lists_what_exists_the_nearest_and_what_failed(site: Site) -> None:
    site.install("acme", {"r": reward("deepscaler"), "s": reward("math"), "m": model("mine", "A")})
    site.install("bolt", {"bad": "import not_there_at_all"})
    registry = site.load()
    with pytest.raises(PluginError) as caught:
        registry.get("reward", "deepscalar")
    assert str(caught.value) == (
        "unknown reward 'deepscalar'; expected one of deepscaler, math; did you mean 'deepscaler'?\n"
        "  plugin 'bad' from bolt 1.0 did not load: ModuleNotFoundError: No module named 'not_there_at_all'"
    )
    with pytest.raises(PluginError, match=r"unknown algorithm 'math'; there is none. 'math' is the name of a reward"):
        registry.get("algorithm", "math")
    with pytest.raises(PluginError, match=r"unknown kind of component 'rewards'; expected one of.*'reward'"):
        registry.get("rewards", "math")  # type: ignore[arg-type]


def test_selecting_a_broken_plugin_shows_its_traceback(site: Site) -> None:
    site.install("bolt", {"bad": "def helper():\n    raise RuntimeError('deep down')\nhelper()"})
    with pytest.raises(PluginError) as caught:
        site.load().get("reward", "bad")
    message = str(caught.value)
    assert message.startswith("reward 'bad' cannot be had: plugin 'bad' from bolt 1.0 did not load.")
    assert "in helper" in message
    assert message.endswith("RuntimeError: deep down")


def test_what_a_plugin_prints_goes_to_stderr(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.install("acme", {"chatty": "print('hello from import')\n" + textwrap.dedent(reward("chatty"))})
    site.load()
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "hello from import\n"


def test_differences_between_two_sets_of_distributions(site: Site) -> None:
    site.install("acme", {"a": reward("a")}, version="2.0")
    site.install("bolt", {"b": reward("b")})
    assert site.load().differences({"acme": "1.9", "gone": "3.0"}) == [
        "acme: 1.9 there, 2.0 here",
        "bolt: absent there, 1.0 here",
        "gone: 3.0 there, absent here",
    ]


def test_resolve_validates_options_and_builds(site: Site) -> None:
    site.install("acme", {"r": reward("r")})
    registry = site.load()
    assert registry.resolve("reward", "r").scale == 1.0
    assert registry.resolve("reward", "r", {"scale": 3}).scale == 3.0
    options = registry.get("reward", "r").component.options(scale=4)
    assert registry.resolve("reward", "r", options).scale == 4.0
    with pytest.raises(PluginError) as caught:
        registry.resolve("reward", "r", {"scale": "much", "scael": 1})
    assert str(caught.value) == (
        "options of reward 'r' from acme 1.0 are wrong\n"
        "  scale: Input should be a valid number, unable to parse string as a number (given: 'much')\n"
        "  unknown option 'scael'; expected one of scale; did you mean 'scale'?"
    )
    with pytest.raises(PluginError, match="options of reward 'r' are a NoOptions; expected a Options"):
        registry.resolve("reward", "r", NoOptions())


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        ("import a_missing_library", "needs something that cannot be imported: No module named 'a_missing_library'"),
        ("raise KeyError('lost')", r"could not be built\..*in build\b.*KeyError: 'lost'"),
    ],
)
def test_what_build_raises_becomes_a_plugin_error(site: Site, raised: str, message: str) -> None:
    source = HEAD.removesuffix("@milepost.hookimpl\n").replace("return None", raised)
    site.install("acme", {"r": source + "@milepost.hookimpl\ndef milepost_rewards(): return [reward()]"})
    with pytest.raises(PluginError, match=rf"(?s)reward 'r' from acme 1\.0 {message}"):
        site.load().resolve("reward", "r")


def test_an_error_of_milepost_raised_in_build_is_not_wrapped(site: Site) -> None:
    source = HEAD.replace(
        "return None",
        "from milepost.errors import ConfigError, Problem; raise ConfigError([Problem('a.b', 'is wrong')])",
    )
    site.install("acme", {"r": source + "def milepost_rewards(): return [reward()]"})
    with pytest.raises(ConfigError) as caught:
        site.load().resolve("reward", "r")
    assert caught.value.problems == (Problem("a.b", "is wrong"),)


def test_the_process_wide_registry(site: Site, process_registry: Callable[[Registry | None], None]) -> None:
    site.install("acme", {"r": reward("r")})
    process_registry(site.load())
    assert resolve("reward", "r", {"scale": 2}).score(None) == 2.0
    process_registry(None)
    loaded = current()
    assert loaded is current()
    assert "grpo" in loaded.names("algorithm")


def test_a_plugin_may_not_ask_for_others_while_it_is_imported(
    site: Site, process_registry: Callable[[Registry | None], None]
) -> None:
    site.install("acme", {"eager": "import milepost\nmilepost.resolve('reward', 'math')"})
    process_registry(None)
    (record,) = site.load().plugins
    assert "do it in Component.build, which runs later" in record.error
    assert "grpo" in current().names("algorithm")
