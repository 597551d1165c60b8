"""Context parallel: the processes of a group compute pieces of the same sequences."""

import inspect
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from trainkit.basics.packages import require
from trainkit.basics.torch_internals import compiled_call
from trainkit.distributed import Processes
from trainkit.distributed.collectives import require_equal
from trainkit.distributed.part_of_processes import part_of
from trainkit.errors import ConfigError, quoted
from trainkit.strategies.sharded import outside_graphs
from trainkit.strategies.strategy import cut_models
from trainkit.types import IGNORED, NOTHING, class_name

_NAME = "context_parallel"  # of our attention in transformers, and of what a forward hands to it
_CUT = {"input_ids": 0, "labels": IGNORED, "inputs_embeds": 0.0}  # with what they are filled up
_NOT_LOCAL = ("dynamic", "longrope")  # rotary embeddings that depend on the end of a sequence


class ContextParallel:
    """Cuts sequences, so that each process of a group computes a piece of them.

    A sequence is cut into twice as many parts as processes, of which each has one from the front
    and one from the end: under a causal mask all have as much to do. Attention gathers keys and
    values from the group; all else is computed of the own piece alone.

    Args:
        processes: Those of the job; neighbours are a group, and see the same samples.
        size: How many are in a group.

    Attributes:
        data: The processes with samples of their own; each is of another group.
        group: Those that have a sequence together.
        is_open: Whether a loop of the user's own has cut what it gives its model.
    """

    def __init__(self, processes: Processes, size: int) -> None:
        if processes.size % size:
            raise ConfigError(
                f"`context_parallel` must divide the number of processes, but is {size} on "
                f"{processes.size}. Pass a divisor, or start more processes."
            )
        groups = [tuple(range(first, first + size)) for first in range(0, processes.size, size)]
        self.group = part_of(processes, groups)
        self.data = part_of(processes, [*zip(*groups, strict=True)])
        self._all = processes
        self._chunks = (self.group.rank, 2 * size - 1 - self.group.rank)
        self.is_open = False
        self._is_checked = False
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def attach(self, model: nn.Module) -> None:
        """Let each forward of a causal model of transformers that is given labels be cut."""
        require("transformers", "`context_parallel`, which cuts what its causal models are given")
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        base: Any = getattr(model, "get_base_model", lambda: model)()  # of one that peft adapts
        if (why := _why_not(model, base)) is not None:
            raise ConfigError(
                f"`context_parallel` cannot cut what `{class_name(model)}` sees: {why}."
            )
        if model in self._models:
            return
        if model in cut_models:  # by an earlier strategy
            cut_models[model]()
        AttentionInterface.register(_NAME, _attention)
        AttentionMaskInterface.register(_NAME, sdpa_mask)
        base.set_attn_implementation(_NAME)
        hooks: list[RemovableHandle] = [
            model.register_forward_pre_hook(
                outside_graphs(self._before_forward), prepend=True, with_kwargs=True
            ),
            model.register_forward_hook(outside_graphs(self._after_forward), with_kwargs=True),
        ]

        def release() -> None:
            for hook in hooks:
                hook.remove()
            base.set_attn_implementation("sdpa")
            self._models.discard(model)
            del cut_models[model]

        self._is_checked = False
        self._models.add(model)
        cut_models[model] = release

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # a copy of a model is cut as that one is

    def close(self) -> None:
        for model in [*self._models]:
            cut_models[model]()
        for part in (self.group, self.data):
            if part is not self._all:
                part.close()

    # A forward that is given labels, and whose loss all have in the end.

    def _before_forward(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        names = [*inspect.signature(model.forward).parameters]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if self.is_open:
            padding = given.get("attention_mask")
            if padding is not None and not bool(padding.all()):
                raise ConfigError(
                    "Inside `maybe_context_parallel` attention sees all of a sequence before it, "
                    "but `attention_mask` leaves some out. Fill up at the end, without a mask."
                )
            return (), {**given, **_handed(Cut(self))}
        if given.get("labels") is None:
            if model.training and torch.is_grad_enabled():
                raise ConfigError(
                    "`context_parallel` cuts what a model is given with `labels`, and the step "
                    "gave none: each process would compute whole sequences. Pass `labels`, or "
                    "cut by `Accelerator.maybe_context_parallel`."
                )
            return None
        if compiled_call(model) is not None:
            raise ConfigError(
                "`context_parallel` gathers keys and values in each attention, which "
                "`torch.compile` cannot. Leave out `compile`."
            )
        if not self._is_checked:
            tensors = {name: t for name, t in given.items() if isinstance(t, Tensor)}
            seen = [[n, [*t.shape], t.detach().double().sum().item()] for n, t in tensors.items()]
            require_equal(self.group, seen, _other_inputs)
        return (), self._cut(given)

    def _cut(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return what a process hands to its model of what all of a group were given."""
        labels: Tensor = given["labels"]
        length = labels.shape[1]
        padding, positions = given.pop("attention_mask", None), given.pop("position_ids", None)
        shifted = given.pop("shift_labels", None)
        if shifted is None:
            shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        others = [n for n, t in given.items() if isinstance(t, Tensor) and t.ndim and n not in _CUT]
        others += [n for n in ("logits_to_keep", "past_key_values") if given.get(n)]
        others += ["return_dict"] * (given.get("return_dict") is False)
        if others or {t.ndim for t in (labels, padding, positions) if t is not None} != {2}:
            raise ConfigError(
                f"`context_parallel` cuts {quoted([*_CUT, 'attention_mask', 'position_ids'])}, of "
                f"samples and length, but the model is given {quoted(others) or 'another shape'}. "
                "Leave that out."
            )
        # Reads the device, as transformers does for its masks; by its rules, where there is a mask,
        # positions tell no documents apart.
        documents = None if positions is None or padding is not None else _documents(positions)
        cut = Cut(self, length, documents, _needed(padding, positions, shifted))
        if positions is None:
            positions = torch.arange(length, device=labels.device)[None]
        more = -length % (2 * self.group.size)  # at the end, where a causal mask shows it to nobody
        if given.get("num_items_in_batch") is None:
            given["num_items_in_batch"] = (shifted != IGNORED).sum()
        for name in _CUT.keys() & given.keys():
            if isinstance(given[name], Tensor):
                given[name] = self.piece(_filled(given[name], more, _CUT[name]), 1)
        given["shift_labels"] = self.piece(_filled(shifted, more, IGNORED), 1)
        given["position_ids"] = self.piece(_filled(positions, more, 0), 1)
        return {**given, "use_cache": False, **_handed(cut)}

    def _after_forward(self, model: nn.Module, _: Any, kwargs: Any, outputs: Any) -> Any:
        cut: Cut | None = kwargs.get(_NAME)
        if cut is None or not cut.length:
            return outputs
        if not self._is_checked:
            self._check(model, cut, kwargs, outputs)
            self._is_checked = True
        outputs["loss"] = _Summed.apply(outputs["loss"], self.group)  # type: ignore[no-untyped-call]
        if not model.training and not torch.is_grad_enabled() and self.data.wants_outputs:
            outputs["logits"] = self.whole(outputs["logits"], 1)[:, : cut.length]
        return outputs

    def _check(self, model: nn.Module, cut: "Cut", kwargs: Any, outputs: Any) -> None:
        """Raise, in the first forward, where a model has not computed what it was to."""
        layers, why = getattr(_text_config(model), "num_hidden_layers", 1), ""
        if not cut.calls or cut.calls % layers:  # some call it twice
            why = f"{cut.calls} attentions of its {layers} layers have seen all of a sequence"
        else:
            with torch.no_grad():
                scores, labels = outputs["logits"].float().flatten(0, 1), kwargs["shift_labels"]
                loss = F.cross_entropy(scores, labels.flatten(), reduction="sum")
                loss = (loss / kwargs["num_items_in_batch"]).to(outputs["loss"])
            if not torch.allclose(loss, outputs["loss"], rtol=1e-2, equal_nan=True):
                why = "its loss is not the mean cross entropy of the next labels"
        if why:
            raise ConfigError(
                f"`context_parallel` cannot cut what `{class_name(model)}` sees: {why}. Use a "
                "model whose layers all attend to it, with the usual loss."
            )

    # Sequences.

    def piece(self, whole: Tensor, dim: int) -> Tensor:
        """Return the piece of this process."""
        parts = whole.chunk(2 * self.group.size, dim)
        return torch.cat([parts[chunk] for chunk in self._chunks], dim)

    def whole(self, piece: Tensor, dim: int) -> Tensor:
        """Return what the pieces of all are together; without a graph."""
        pieces = self.group.all_gather(piece.detach()[None].contiguous(), (1,) * self.group.size)
        early, late = zip(*(each.chunk(2, dim) for each in pieces), strict=True)
        return torch.cat([*early, *reversed(late)], dim)

    @contextmanager
    def cut_buffers(
        self, buffers: Sequence[Tensor], dims: Sequence[int], kept: Collection[Tensor]
    ) -> Iterator[None]:
        """Let tensors be their pieces inside, and `F.scaled_dot_product_attention` see all of them.

        See `Accelerator.maybe_context_parallel`; `kept` stay cut.
        """
        if len(buffers) != len(dims) or any(all(k is not b for b in buffers) for k in kept):
            raise ConfigError(
                f"`buffer_seq_dims` must say it for each of the {len(buffers)} `buffers`, but has "
                f"{len(dims)} entries, or one of `no_restore_buffers` is not among them."
            )
        parts = 2 * self.group.size
        if wrong := [
            str(n) for b, dim in zip(buffers, dims, strict=True) if (n := b.shape[dim]) % parts
        ]:
            raise ConfigError(
                f"`buffers` have the lengths {quoted(wrong)}, which {parts}, twice the number of "
                "processes that share a sequence, must divide. Fill them up at the end, with "
                "labels of -100."
            )
        before = [b.data for b in buffers]
        with self.attending(Cut(self)):
            for b, dim in zip(buffers, dims, strict=True):
                b.data = self.piece(b.data, dim)
            self.is_open = True
            try:
                yield
            finally:
                self.is_open = False
                for b, whole in zip(buffers, before, strict=True):
                    if all(b is not each for each in kept):
                        b.data = whole

    @contextmanager
    def attending(self, cut: "Cut") -> Iterator[None]:
        """Let attention of torch see, from the piece of this process, all of a sequence."""
        plain = F.scaled_dot_product_attention

        def attention(*args: Any, **options: Any) -> Tensor:
            F.scaled_dot_product_attention = plain  # what torch makes of a causal bias looks here
            try:
                return self._attend(cut, *args, **options)
            finally:
                F.scaled_dot_product_attention = attention

        F.scaled_dot_product_attention = attention
        try:
            yield
        finally:
            F.scaled_dot_product_attention = plain

    def _attend(
        self,
        cut: "Cut",
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        """Return the attention of the own part of a sequence to all of it."""
        if attn_mask is not None or key.shape[-2] != query.shape[-2]:
            raise ConfigError(
                "`context_parallel` is for attention of a sequence to itself, without a mask but "
                "the causal one, but there is a mask, or keys of another length. Leave the mask "
                "out, with `is_causal=True`."
            )
        cut.calls += 1
        both = _Gathered.apply(torch.cat([key, value], dim=-1), self)  # type: ignore[no-untyped-call]
        keys, values = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        attend: Any = partial(F.scaled_dot_product_attention, dropout_p=dropout_p, **options)
        if not is_causal:
            whole: Tensor = attend(query, keys, values)
            return whole
        results = []
        for chunk, own in zip(self._chunks, query.chunk(2, dim=-2), strict=True):
            end = (chunk + 1) * own.shape[-2]
            mask = cut.mask(own.shape[-2], end, query.device)
            seen = keys[..., :end, :], values[..., :end, :]
            results.append(attend(own, *seen, mask, is_causal=mask is None))
        return torch.cat(results, dim=-2)


class Cut:
    """How the sequences of one forward are cut; no data class, of which `fully_shard` makes copies.

    Args:
        length: Of a whole one; 0: whoever calls the model has cut them.
        documents: Numbers [samples, length] of what must not see each other; None: there is one.
        padding: Where [samples, length] a sequence has something to see; None: everywhere.
    """

    def __init__(
        self,
        context: ContextParallel,
        length: int = 0,
        documents: Tensor | None = None,
        padding: Tensor | None = None,
    ) -> None:
        self.context, self.length = context, length
        self.documents, self.padding = documents, padding
        self.calls = 0
        """How often attention was computed."""

    def mask(self, rows: int, end: int, device: torch.device) -> Tensor | None:
        """Return which of `end` keys each of the last `rows` queries sees; None: all are causal."""
        is_plain = self.documents is None and self.padding is None
        if is_plain and rows == end:
            return None
        if is_plain and device.type != "cpu":
            from torch.nn.attention.bias import causal_lower_right

            return causal_lower_right(rows, end)  # which no kernel needs as a tensor
        seen = torch.ones(rows, end, dtype=torch.bool, device=device).tril(end - rows)
        if self.padding is not None:
            seen = seen & _filled(self.padding, end - self.length, 0)[:, None, None, :end]
        if self.documents is not None:
            keys = _filled(self.documents, end - self.length, -1)[:, :end]
            seen = seen & (keys[:, None, end - rows :, None] == keys[:, None, None])
        return seen


class _Gathered(torch.autograd.Function):
    """The sequence that pieces are of; its gradient is the sum of what all computed by it."""

    @staticmethod
    @override
    def forward(ctx: Any, piece: Tensor, context: ContextParallel) -> Tensor:
        ctx.context = context
        return context.whole(piece, -2)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).contiguous()
        whole = ctx.context.group.all_reduce(wide)
        return ctx.context.piece(whole, -2).to(gradient.dtype), None


class _Summed(torch.autograd.Function):
    """The sum over a group. Its gradient is larger by that, as all processes are averaged."""

    @staticmethod
    @override
    def forward(ctx: Any, own: Tensor, group: Processes) -> Tensor:
        ctx.size = group.size
        return group.all_reduce(own.detach().clone())

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.size, None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return what transformers' attention by SDPA does, of a cut sequence where one is handed."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    plain: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS["sdpa"]
    cut: Cut | None = kwargs.pop(_NAME, None)
    if cut is None:
        return plain(module, query, key, value, attention_mask, *args, **kwargs)
    with NOTHING if cut.context.is_open else cut.context.attending(cut):
        return plain(module, query, key, value, None, *args, **kwargs)


def _handed(cut: Cut) -> dict[str, Any]:
    """Return what tells attention that it is cut, and keeps a model from making masks."""
    return {_NAME: cut, "attention_mask": torch.zeros(1, 1, 1, 1, dtype=torch.bool)}


def _needed(padding: Tensor | None, positions: Tensor | None, labels: Tensor) -> Tensor | None:
    """Return a mask, as booleans, if a causal one is not enough."""
    if padding is None:
        return None
    padding = padding.bool()
    in_front = (padding[:, 1:] & ~padding[:, :-1]).any()
    counts = ((labels != IGNORED) & ~padding).any()
    if not bool(in_front | counts):
        return None  # what is filled up at the end is seen by nobody else
    if positions is None and bool(in_front):
        raise ConfigError(
            "Sequences are filled up in front, and the batch has no `position_ids`, of which "
            "each model makes its own. Fill them up at the end, or pass `position_ids`."
        )
    return padding


def _documents(positions: Tensor) -> Tensor | None:
    """Return the numbers of documents in rows; None where there is one."""
    documents = (positions[:, 1:] - positions[:, :-1] != 1).cumsum(-1)
    return F.pad(documents, (1, 0)) if bool(documents.any()) else None


def _filled(tensor: Tensor, more: int, value: float) -> Tensor:
    """Return a tensor that is longer in dimension 1, or as it is."""
    if more <= 0:
        return tensor
    return F.pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, more), value=value)


def _why_not(model: nn.Module, base: Any) -> str | None:
    """Return why a model cannot be cut, and what to do."""
    config, text = getattr(base, "config", None), _text_config(base)
    attention = getattr(config, "_attn_implementation", None)
    kinds = {*(getattr(text, "layer_types", None) or ())}
    if not kinds and getattr(text, "sliding_window", None):
        kinds = {"sliding_attention"}
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    ropes = [each for each in (rope, *rope.values()) if isinstance(each, dict)]  # of each kind
    reasons = {
        "it is no causal model of transformers that takes `position_ids` and has the usual loss. "
        "Use one, or `Accelerator.maybe_context_parallel` in a loop of your own": (
            getattr(getattr(base, "loss_function", None), "__name__", "") != "ForCausalLMLoss"
            or "position_ids" not in inspect.signature(base.forward).parameters
        ),
        f'its attention is "{attention}". Load it with `attn_implementation="sdpa"`': (
            attention not in ("sdpa", _NAME)
        ),
        f"its layers are of the kinds {quoted(sorted(kinds))}, and only full attention can be cut. "
        "Use a model that has no other": bool(kinds - {"full_attention"})
        or getattr(base, "_is_stateful", False),
        "its positions are scaled by the length of a sequence, its loss has a term of the router, "
        "or it is not causal: a piece has not what that needs. Change its `config`": (
            any(value in _NOT_LOCAL for each in ropes for value in map(str, each.values()))
            or getattr(text, "output_router_logits", False)
            or not getattr(text, "is_causal", True)
        ),
        "it puts virtual tokens before each sequence. Adapt it in another way": getattr(
            getattr(model, "active_peft_config", None), "is_prompt_learning", False
        ),
    }
    return next((why for why, is_so in reasons.items() if is_so), None)


def _text_config(model: Any) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _other_inputs(of_all: Sequence[Any]) -> ConfigError:
    return ConfigError(
        f"The {len(of_all)} processes that share sequences must see the same batch, but in the "
        "first forward they were given others. Give all of them the same data in the same order; "
        "where loaders are `presharded`, a share is that of a group."
    )
