"""Random small models as source text, and random ways to train them: what ``test_random_models`` draws from."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from tests.dist.test_bits import BLOCK_MIB

#: the widths that values have; none is divided evenly by both 2 and 3
WIDTHS = (2, 3, 4, 5, 7, 8)
#: length of the sequences, width of the inputs, number of tokens
SEQ, WIDTH, TOKENS = 3, 5, 11
MAX_WIDTH = 16

POLICIES = (
    "prefetch",
    "none",
    "keep{units=2},prefetch{lookahead=2}",
    "keep{units=0},bucket{mib=0},prefetch{lookahead=3}",
    "bucket{mib=0.0001},prefetch",
    f"keep{{units=1000}},bucket{{mib={BLOCK_MIB}}}",
    "keep{units=1 mib=0.0002},bucket{mib=0.0002},prefetch{lookahead=2 limit_mib=0.0005}",
)

HEAD = """\
class Model(nn.Module):
    def __init__(self):
        super().__init__()
"""


@dataclass(frozen=True)
class Example:
    """A model and how it is trained.

    Attributes:
        source: defines ``Model``, whose forward takes ``x`` of [rows, SEQ, WIDTH] and ``tokens`` of [rows, SEQ].
        dtype: of the parameters and ``x``.
        stage: ZeRO stage.
        policy: schedule passes.
        ignore: patterns of parameters that are not sharded.
        outputs_train: the loss reaches every output, not ``loss`` alone.
        windows: for each optimizer step its micro-batches: ``s`` reduces, ``n`` is a backward inside ``no_sync``.
        declared: micro-batches of the declared window; a shorter one is ended by hand.
        eval_after: number of optimizer steps after which the model is evaluated; None: never.
        freeze_after: number of optimizer steps after which trainability is inverted for the first module; None: never.
        ragged: ranks have different numbers of rows.
        keep_gradients: ``zero_grad(set_to_none=False)``.
        clip: the largest norm of the gradients; None: not clipped.
    """

    source: str
    dtype: str
    stage: int
    policy: str
    ignore: tuple[str, ...]
    outputs_train: bool
    windows: tuple[str, ...]
    declared: int
    eval_after: int | None
    freeze_after: int | None
    ragged: bool
    keep_gradients: bool
    clip: float | None

    def __str__(self) -> str:
        return "\n".join([*(f"{k} = {v!r}" for k, v in vars(self).items() if k != "source"), "", self.source])


@dataclass
class _Writer:
    """The text of a model while it is drawn.

    Attributes:
        values: the width of each value so far; all are [rows, SEQ, width].
        modules: for each module its kind and widths.
    """

    draw: DrawFn
    init: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    values: dict[str, int] = field(default_factory=dict)
    modules: dict[str, tuple[str, int, int]] = field(default_factory=dict)

    def pick(self, *choices: object) -> object:
        return self.draw(st.sampled_from(choices))

    def chance(self, one_in: int) -> bool:
        return self.draw(st.integers(1, one_in)) == one_in

    def value(self, width: int | None = None) -> tuple[str, int]:
        """One of the values so far (the later the likelier), and its width."""
        names = [n for n, w in self.values.items() if width in (None, w)]
        name = str(self.pick(names[-1], *names[-3:], *names))
        return name, self.values[name]

    def width(self) -> int:
        return int(str(self.pick(*WIDTHS)))

    def add(self, width: int, text: str) -> None:
        name = f"v{len(self.values)}"
        self.values[name] = width
        self.body.append(f"{name} = {text}")

    def module(self, kind: str, made: str, before: int, after: int, *, reuse: bool = True) -> str:
        """An attribute with such a module: a new one, or one that is used again."""
        known = [n for n, m in self.modules.items() if m[0] == kind and m[1] == before and m[2] == after]
        if known and reuse and self.chance(3):
            return str(self.pick(*known))
        name = f"{kind}{len(self.modules)}"
        self.modules[name] = (kind, before, after)
        self.init.append(f"self.{name} = {made}")
        return name

    def linear(self, before: int, after: int) -> str:
        bias = self.chance(2)
        known = list(self.modules)
        name = self.module("linear", f"nn.Linear({before}, {after}, bias={bias})", before, after)
        if name in known:
            return name
        same = [n for n in known if self.modules[n] in (("linear", before, after), ("embedding", after, before))]
        if same and self.chance(2):
            self.init.append(f"self.{name}.weight = self.{self.pick(*same)}.weight")
        return name

    def parameter(self, made: str) -> str:
        return self.module("p", f"nn.Parameter({made})", 0, 0, reuse=False)


def _linear(w: _Writer) -> None:
    v, width = w.value()
    after = w.width()
    name = w.linear(width, after)
    forms = (
        f"self.{name}({v})",
        f"self.{name}({v})",
        f"self.{name}({v}.transpose(0, 1)).transpose(0, 1)",
        f"checkpoint(self.{name}, {v}, use_reentrant=False)",
        f"self.{name}({v}.reshape(-1, {width})).unflatten(0, {v}.shape[:2])",
        f"F.linear({v}.double(), self.{name}.weight.double()).to({v}.dtype)",
        f"{v} @ self.{name}.weight.t()",
        f"torch.einsum('bsi,oi->bso', {v}, self.{name}.weight) + self.{name}.weight.norm()",
        f"self.{name}({v}) + self.{name}(torch.sin({v}))",
        f"torch.func.functional_call(self.{name}, {{'weight': self.{name}.weight * 2}}, ({v},))",
    )
    w.add(after, str(w.pick(*forms)))


def _norm(w: _Writer) -> None:
    v, width = w.value()
    kind = str(w.pick("LayerNorm", "RMSNorm", "BatchNorm1d", "GroupNorm"))
    made = f"nn.GroupNorm(1, {width})" if kind == "GroupNorm" else f"nn.{kind}({width})"
    name = w.module(kind.lower(), made, width, width)
    channels_first = kind in ("BatchNorm1d", "GroupNorm")
    w.add(width, f"self.{name}({v}.transpose(1, 2)).transpose(1, 2)" if channels_first else f"self.{name}({v})")


def _conv(w: _Writer) -> None:
    v, width = w.value()
    after = w.width()
    kind = str(w.pick("Conv1d", "ConvTranspose1d"))
    name = w.module(kind.lower(), f"nn.{kind}({width}, {after}, 3, padding=1)", width, after)
    w.add(after, f"self.{name}({v}.transpose(1, 2)).transpose(1, 2)")


def _attention(w: _Writer) -> None:
    v, width = w.value()
    if w.chance(2):
        name = w.module("attention", f"nn.MultiheadAttention({width}, 1, batch_first=True)", width, width)
        w.add(width, f"self.{name}({v}, {v}, {v}, need_weights=False)[0]")
    else:
        q, k = w.linear(width, width), w.linear(width, width)
        w.add(width, f"F.scaled_dot_product_attention(self.{q}({v}), self.{k}({v}), {v}, is_causal={w.chance(2)})")


def _embedding(w: _Writer) -> None:
    after = w.width()
    name = w.module("embedding", f"nn.Embedding({TOKENS}, {after})", TOKENS, after)
    w.add(after, f"self.{name}(tokens)")


def _recurrent(w: _Writer) -> None:
    v, width = w.value()
    name = w.module("gru", f"nn.GRU({width}, 4, batch_first=True)", width, 4)
    w.add(4, f"self.{name}({v})[0]")


def _activation(w: _Writer) -> None:
    v, width = w.value()
    forms = ("torch.tanh({})", "F.gelu({})", "F.relu({})", "F.silu({})", "{}.softmax(-1)", "Cube.apply({})")
    w.add(width, str(w.pick(*forms)).format(v))


def _dropout(w: _Writer) -> None:
    v, width = w.value()
    w.add(width, f"F.dropout({v}, {w.pick(0.1, 0.5)}, self.training)")


def _join(w: _Writer) -> None:
    v, width = w.value()
    u, _ = w.value(width)
    forms = (f"{v} + {u}", f"{v} * torch.sigmoid({u})", f"torch.where({v} > 0, {v}, {u})", f"torch.maximum({v}, {u})")
    w.add(width, str(w.pick(*forms)))


def _cat(w: _Writer) -> None:
    (v, a), (u, b) = w.value(), w.value()
    if a + b <= MAX_WIDTH:
        w.add(a + b, f"torch.cat([{v}, {u}], -1)")


def _cut(w: _Writer) -> None:
    v, width = w.value()
    if width > 2:
        w.add(*w.pick((width - 1, f"{v}[..., 1:]"), (2, f"{v}[..., :2]"), (1, f"{v}.mean(-1, keepdim=True)")))  # type: ignore[misc]


def _view(w: _Writer) -> None:
    v, width = w.value()
    forms = (
        f"{v}.reshape(-1, {width}).flip(0).view({v}.shape)",
        f"{v}.transpose(0, 1).contiguous().transpose(0, 1)",
        f"{v}.flatten(1).unflatten(1, ({SEQ}, {width}))",
        f"{v}.expand(2, *{v}.shape).mean(0)",
        f"{v}.unsqueeze(1).squeeze(1).roll(1, 1)",
        f"{v}.clone().mul_(0.5).add_(0.1)",
        f"torch.stack([t * (i + 1) for i, t in enumerate({v}.unbind(1))], 1)",
    )
    w.add(width, str(w.pick(*forms)))


def _direct(w: _Writer) -> None:
    """Parameters that belong to no layer."""
    v, width = w.value()
    shape = str(w.pick("()", f"({width},)", f"({SEQ}, {width})", f"(1, 1, {width})"))
    if w.chance(3):
        after = w.width()
        w.add(after, f"{v} @ self.{w.parameter(f'torch.randn({width}, {after}) * 0.3')}")
    elif w.chance(3):
        w.add(width, f"{v} @ self.{w.parameter(f'(torch.randn({width}, {width}) * 0.3).t()')}")
    else:
        w.add(width, f"{v} * self.{w.parameter(f'torch.rand({shape})')}")


def _buffer(w: _Writer) -> None:
    v, width = w.value()
    name = w.module("buffer", f"Buffer({width})", width, width, reuse=False)
    w.body.append(f"self.{name}.mean.lerp_({v}.detach().mean((0, 1)).to(self.{name}.mean.dtype), 0.1)")
    w.add(width, f"{v} - self.{name}.mean")


_STEPS = (_linear,) * 5 + (_norm, _norm, _conv, _attention, _embedding, _recurrent, _activation, _activation, _dropout)
_STEPS += (_join,) * 3 + (_cat, _cut, _view, _view, _direct, _direct, _buffer)


@st.composite
def sources(draw: DrawFn) -> str:
    """The text of a model."""
    w = _Writer(draw, values={"x": WIDTH})
    if w.chance(3):
        w.init.append("self.register_buffer('unread', torch.ones(2))")
    for step in (_linear, *draw(st.lists(st.sampled_from(_STEPS), min_size=1, max_size=7))):
        step(w)
    width = list(w.values.values())[-1]
    if w.chance(3):
        _linear(w)
    if w.chance(3):
        w.module("unused", f"nn.Linear({width}, 3)", 0, 0, reuse=False)
    modules = [n for n in w.modules if not n.startswith("p")]
    for name in modules:
        if w.chance(6):
            w.init.append(f"self.{name}.requires_grad_(False)")
    outs = dict.fromkeys([list(w.values)[-1], *(w.value()[0] for _ in range(draw(st.integers(0, 2))))])
    loss = " + ".join(f"{v}.square().mean()" for v in outs)
    returned = (
        f"{{'loss': {loss}}}",
        f"{{'loss': {loss}, 'out': {', '.join(outs)}}}"
        if len(outs) == 1
        else f"{{'loss': {loss}, 'out': [{', '.join(outs)}, None]}}",
        f"({', '.join(outs)},)",
        f"({', '.join(outs)}, x, {{'n': {len(outs)}}})",
    )
    body = [*w.body, f"return {w.pick(*returned)}"]
    init = "".join(f"        {line}\n" for line in w.init)
    return f"{HEAD}{init}\n    def forward(self, x, tokens):\n" + "".join(f"        {line}\n" for line in body)


@st.composite
def examples(draw: DrawFn) -> Example:
    """A model and how it is trained."""
    rarely = st.sampled_from((None, None, None, None, 1))
    return Example(
        source=draw(sources()),
        dtype=draw(st.sampled_from(("float64", "float32"))),
        stage=draw(st.sampled_from((3, 0, 1, 2))),
        policy=draw(st.sampled_from(POLICIES)),
        ignore=draw(st.sampled_from(((), (), ("linear*", "p*"), ("*bias",)))),
        outputs_train=draw(st.booleans()),
        windows=tuple(draw(st.lists(st.sampled_from(("s", "ss", "ns", "nns", "sns")), min_size=2, max_size=3))),
        declared=draw(st.sampled_from((1, 3))),
        eval_after=draw(rarely),
        freeze_after=draw(rarely),
        ragged=draw(st.sampled_from((False, False, False, True))),
        keep_gradients=draw(st.booleans()),
        clip=draw(st.sampled_from((None, None, 0.1))),
    )
