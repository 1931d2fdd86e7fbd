"""The five hooks a milepost plugin may implement.

All have one shape: no argument, an iterable of `Component` records. A plugin is a module (or object) with
`@milepost.hookimpl` functions, named in the entry-point group `milepost`. Its import must be light: no torch, ray,
sglang, megatron or transformers; `Component.build` imports those.
"""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from milepost.components import (
    AdvantageComponent,
    AlgorithmComponent,
    ModelComponent,
    RewardComponent,
    TransportComponent,
)

GROUP = "milepost"
hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)


@hookspec
def milepost_algorithms() -> Iterable[AlgorithmComponent]:
    """Return the algorithms this plugin provides.

    Example::

        import milepost
        from milepost.components import AlgorithmTraits

        class Options(milepost.Options):
            scale: float = 1.0

        def build(options):
            from my_plugin.loss import Reinforce   # torch is imported here, not at the top
            return Reinforce(options)

        @milepost.hookimpl
        def milepost_algorithms():
            return [milepost.Component("reinforce", Options, AlgorithmTraits(), build, "Plain policy gradient.")]
    """
    return ()


@hookspec
def milepost_advantages() -> Iterable[AdvantageComponent]:
    """Return the advantage estimators this plugin provides.

    Example::

        import milepost
        from milepost.components import AdvantageTraits

        def build(options):
            from my_plugin.raw import RawReward
            return RawReward()

        @milepost.hookimpl
        def milepost_advantages():
            return [milepost.Component("raw", milepost.NoOptions, AdvantageTraits(), build, "The reward itself.")]
    """
    return ()


@hookspec
def milepost_rewards() -> Iterable[RewardComponent]:
    """Return the rewards this plugin provides.

    Example::

        import milepost
        from milepost.components import RewardTraits

        class Short:
            def score(self, sample):
                return 1.0 / (1 + len(sample.text))

        @milepost.hookimpl
        def milepost_rewards():
            traits = RewardTraits(needs_label=False)
            return [milepost.Component("short", milepost.NoOptions, traits, lambda _: Short(), "Short answers.")]
    """
    return ()


@hookspec
def milepost_models() -> Iterable[ModelComponent]:
    """Return the model recipes this plugin provides.

    Example::

        import milepost
        from milepost.components import ModelTraits
        from milepost.weights.layouts import dense_layout, dense_train_flops

        def build(options):
            from my_plugin.recipe import MyRecipe
            return MyRecipe()

        @milepost.hookimpl
        def milepost_models():
            traits = ModelTraits(("MyForCausalLM",), dense_layout, dense_train_flops)
            return [milepost.Component("mine", milepost.NoOptions, traits, build, "Our in-house model.")]
    """
    return ()


@hookspec
def milepost_transports() -> Iterable[TransportComponent]:
    """Return the weight transports this plugin provides.

    Example::

        import milepost
        from milepost.components import TransportTraits

        def build(options):
            from my_plugin.files import FileTransport
            return FileTransport(options)

        @milepost.hookimpl
        def milepost_transports():
            traits = TransportTraits(colocated="either", tensors="full")
            return [milepost.Component("files", milepost.NoOptions, traits, build, "Over a shared file system.")]
    """
    return ()
