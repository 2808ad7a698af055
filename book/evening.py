"""The page "The method in an evening": pieces of the library in reading order, taken from its files as they are.

``TABLE`` is all that is written by hand: chapters, and entries "@file name: words". A name is that of a function, of a
class, which is shown without its methods, or of a constant. The rest is read from the sources when the site is built.
"""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bench.mutants import Mutant, table

LIBRARY = Path(__file__).parents[1] / "cpt_core"
ENTRY = re.compile(r"^@(\S+) (\S+): (.*(?:\n    .*)*)", re.MULTILINE)
SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Warns):\n")
CODE = re.compile(r"(``[^`]+``)|([*_$<>|`\[\]])")  # code, or what Markdown would take for markup
wrong_changes = cache(table)

OPENING = """This is the code of the method, from `schedule(t)` to the quantised gradient, in reading order.
Beside a piece of code stand its name and place, what it is for, the formula, and in a frame what it says of itself.
Below it stand wrong changes that were tried, and the test that notices each."""

TABLE = r"""
## 1. A curve

Training changes the *weights* of a network many times. Every change is an *optimizer step*. A number of q bits can take
$2^q$ values. Cyclic precision training computes some steps with fewer bits than others. A *schedule* says how many bits
every step has. It repeats a curve, the *profile* f. One repetition is a *cycle*. The place in a cycle is x: 0 where it
begins, 1 where it ends. Code takes and returns arrays, so that all steps are computed at once.

@schedules/profiles.py Cosine.growth: This curve rises slowly, then fast, then slowly. $f(x) = \frac{1 - \cos \pi x}{2}$
@schedules/profiles.py Rex: This curve rises late, so that most steps have few bits. Its one constant is d.
@schedules/profiles.py Rex.vertical: The curve itself is 1 minus this. $1 - f(x) = \frac{1 - x}{1 - d + d (1 - x)}$
@schedules/profiles.py Profile.horizontal: A cycle may fall instead of rise. This is the first way to turn a curve. $f(1
    - x)$
@schedules/profiles.py Profile.vertical: This is the second way. For a line and for the cosine both are the same. $1 -
    f(x)$
@schedules/profiles.py SUITE: The paper compares ten schedules. Each is a profile, a word on whether every other cycle
    falls (*triangular*), and the way in which that cycle is turned. The last word is the paper's: how much training
    costs less.

## 2. The bits of a step

The lowest number of bits is $q_{min}$, the highest $q_{max}$. Training has T steps in n cycles. A step is t, and the
first one is 0.

@schedules/schedule.py CyclicSchedule: These are all the values of a schedule.
@schedules/schedule.py CyclicSchedule._values_at: This is the formula of the paper. The cycle is c. $c = \lfloor t n / T
    \rfloor$, $x = (t n - c T) / T$, $S(t) = q_{min} + (q_{max} - q_{min}) f(x)$
@schedules/schedule.py Schedule._bits: Bits are whole numbers. A half goes to the even one. $q_t = \operatorname{round}
    S(t)$
@schedules/schedule.py Schedule.__call__: This is `schedule(t)`.
@schedules/schedule.py Levels: A *gradient* says how the loss changes with a number. A layer multiplies activations (its
    input) with weights. Its gradient enters two more products. So there are four *roles*, and each has its bits.
@schedules/schedule.py Schedule.levels: Weights and activations have $q_t$ bits. Gradients have $q_g$ bits in every
    step, which is $q_{max}$ unless another number is given.

## 3. What a step costs

Most of the work of a step is multiplying two numbers and adding the result: a *multiply-accumulate*, or MAC. A MAC of
an a-bit and a b-bit number counts as $a b / 32^2$ MACs of 32-bit numbers. That is a count of *bit operations*, not a
time. A layer computes three products of about the same size. The *forward product* is its output. The *error product*
is the gradient of its input. The *weight-gradient product* is that of its weights.

@schedules/cost.py step_cost: The forward product has two operands of q bits. The other two have one operand of q bits
    and one gradient. $q_t^2 + 2 q_t q_g$
@schedules/cost.py relative_cost: *Static* precision has the same bits in every step. A schedule is compared with static
    $q_{max}$. $\frac{1}{T} \sum_t \frac{q_t^2 + 2 q_t q_g}{q_{max}^2 + 2 q_{max} q_g}$
@schedules/cost.py noise_exposure: Fewer bits cost less and disturb more. This is how much rounding disturbs, on
    average. $\frac{1}{T} \sum_t 4^{q_{max} - q_t}$

## 4. Rounding a tensor

A *tensor* is an array of numbers. Its *range* goes from its smallest number to its largest. The *grid* is $2^q$ values
in the range, all the same distance s apart. Rounding takes every number to the nearest value of the grid. The result is
still stored as 32-bit numbers (float32), so this is *simulated* quantisation.

@quantization/fake_quantize.py levels_of: Between $2^q$ values lie n steps. $n = 2^q - 1$
@kernels/reference.py per_tensor: One range may serve the whole tensor.
@kernels/reference.py per_channel: Or every output channel of a convolution has its own. Both ends are found by
    `_min_and_width`.
@kernels/reference.py per_row: Or every row has its own.
@kernels/reference.py per_position: Or every place of a sequence has its own.
@kernels/grids.py fake_quantize: The range is found, then the numbers are rounded.
@kernels/reference.py round_to_grid: The distance of the grid is never 0, so that a tensor of equal numbers can be
    divided by it. $s = \max((max - min) / n, 10^{-8})$
@kernels/reference.py nearest: Count the steps from the smallest number, and round the count. Noise is added where
    rounding is to be *stochastic*. $k = \operatorname{round}(\operatorname{clip}((x - min) / s, 0, n))$
@kernels/reference.py _round: From the count, go back to a number. $x_q = k \, s + min$
@kernels/reference.py clips: A number moved by noise can leave the range. Then it is brought back to the end.
@kernels/reference.py hash_noise: A number between two values of the grid goes up or down by chance, more often to the
    nearer one. So it is right on average: $\operatorname{E}[\operatorname{round}(y + u)] = y$, where u is drawn between
    $-1/2$ and $1/2$. The noise depends only on a *key* and on the place, so a run can be repeated.

## 5. Which grid for which tensor

A *quantiser* says which ranges a tensor has and how it is rounded.

@formats/quantizer.py Quantizer: These are its values.
@quantization/quantizers.py QUANTIZERS: Every kind of layer has a quantiser for each of its tensors. The paper's
    experiments use these.
@kernels/reference.py RUNNING_DECAY: A *running range* is an average over the batches of training. This is how much of
    the old average stays.
@kernels/reference.py track: The third number counts how much weight the average has gathered. $r \leftarrow 0.9 \, r +
    0.1 \, (min, max - min, 1)$
@quantization/running.py RunningState._stored: An average that began at 0 is too small at first. Dividing by the
    gathered weight corrects that.
@quantization/running.py RunningState.evaluated: *Evaluation* uses a trained model without changing it. It rounds on the
    running range. Numbers outside it go to its ends.

## 6. What bits mean in a layer

Every quantised layer holds a `LayerPrecision`. It knows the bits of each role. A *format* says which values a grid has.
A *ladder* says which format each level of bits is. The paper's ladder has the grid of q bits at level q.

@quantization/in_force.py meaning: What follows from given bits is worked out once and kept.
@quantization/in_force.py InForce.__init__: Here the bits of every role become its number of steps n and its quantiser.
@quantization/precision.py LayerPrecision.set_levels: New bits arrive here.
@quantization/precision.py LayerPrecision._fill: The numbers of steps are written into tensors that stay the same. So
    compiled code stays valid when bits change.

## 7. The forward pass

The numbers that enter a product are its *operands*.

@quantization/layers.py QuantLinear._multiply: Round the operands, then multiply as always. Products on whole numbers
    are another way to the same result.
@quantization/layers.py _QuantConv._convolve: A convolution does the same.
@quantization/layers.py QuantizedLayer._operands: Input, weight and bias are rounded one by one.
@quantization/precision.py LayerPrecision.operand: From 24 bits on, and without bits, an operand stays as it is.
@quantization/precision.py LayerPrecision._rounded: Training rounds on the tensor's own range and lets the running range
    follow. Evaluation rounds on the running range.
@quantization/precision.py LayerPrecision.multiplied: The product is computed here, and its gradient gets its quantiser.

## 8. The backward pass

Rounding is flat nearly everywhere, so its true gradient is 0 and nothing would be learned. The backward pass treats it
as if it had changed nothing. This is the *straight-through estimator*: $\partial x_q / \partial x = 1$.

@kernels/operators.py _gradient: The gradient of the rounded tensor is handed on as that of the tensor.
@quantization/precision.py LayerPrecision.gradient: The gradient that comes back to a layer's output is rounded as well.
@quantization/precision.py LayerPrecision._with_rounded_gradient: It has a number of steps and noise of its own.
@quantization/fake_quantize.py quantize_gradient: In the forward pass this changes nothing.
@quantization/fake_quantize.py _QuantizeGradient.backward: In the backward pass it rounds.
@quantization/fake_quantize.py round_gradient: This is the quantised gradient. It is rounded by chance, so that small
    gradients are not lost on average. Both backward products take it.

## 9. A whole model
@quantization/layers.py QuantizedLayer.from_float: A layer becomes quantised by changing its class. Its weights stay the
    same objects.
@quantization/convert.py quantize_: Every layer that multiplies is converted. Most of these lines refuse what would go
    wrong later.
@quantization/scheduler.py PrecisionScheduler.__init__: The scheduler connects a schedule and a model. Step 0 is applied
    at once.
@quantization/scheduler.py PrecisionScheduler.step: A training loop calls this after each optimizer step.
@quantization/scheduler.py PrecisionScheduler._apply: The circle closes: the schedule is asked for its bits, and every
    layer is told.

## 10. Counting the work of a model
@bitops/macs.py linear_macs: Each of the output's numbers is a sum over all inputs. $y_i = \sum_k w_{ik} x_k$
@bitops/macs.py conv_macs: Each of the output's numbers is a sum over the kernel and the channels of its group.
@bitops/tally.py Tally.total: Then each is multiplied by the bits of both operands. $\sum \, \mathrm{MACs} \cdot a \, b
    / 32^2$
@bitops/plan.py count_bitops: All of it before training: a model, its input, a schedule.
"""


@dataclass(frozen=True)
class Shown:
    """What stands in a file of the library under a name: its lines without docstring and methods, and the docstring."""

    file: str
    name: str
    line: int
    source: str
    doc: str

    @property
    def mutants(self) -> list[Mutant]:
        """The wrong changes of ``bench/mutants.toml`` that lie in these lines."""
        return [m for m in wrong_changes() if m.file == f"cpt_core/{self.file}" and m.before in self.source]


def shown(file: str, name: str) -> Shown:
    """Return what a file has under a qualified name; LookupError where there is nothing."""
    text = (LIBRARY / file).read_text(encoding="utf-8")
    node: Any = ast.parse(text)
    for part in name.split("."):
        node = next((n for n in node.body if part in _names(n)), None)
        if node is None:
            raise LookupError(f"cpt_core/{file} has no {name}")
    documented = isinstance(node, ast.ClassDef | ast.FunctionDef)
    doc = (ast.get_docstring(node) or "") if documented else ""
    hidden = [n for n in node.body if isinstance(n, ast.FunctionDef)] if isinstance(node, ast.ClassDef) else []
    hidden += node.body[:1] if doc else []
    left_out = {i for n in hidden for i in range(_first(n), n.end_lineno + 1)}
    lines = {i: line for i, line in enumerate(text.splitlines(), 1) if _first(node) <= i <= node.end_lineno}
    source = "\n".join(line for i, line in lines.items() if i not in left_out)
    return Shown(file, name, _first(node), re.sub(r"(?<=:\n)\n+|(?<=\n\n)\n+", "", source).rstrip(), doc)


def _names(node: Any) -> list[str]:
    targets = [getattr(node, "target", None), *getattr(node, "targets", ())]
    return [getattr(node, "name", ""), *(target.id for target in targets if isinstance(target, ast.Name))]


def _first(node: Any) -> int:
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def entries() -> list[Shown]:
    """Return what the page shows, in order."""
    return [shown(file, name) for file, name, _ in ENTRY.findall(TABLE)]


def page() -> str:
    """Return the page."""
    found = entries()
    lines, wrong = sum(len(e.source.splitlines()) for e in found), sum(len(e.mutants) for e in found)
    end = f"Shown: {lines:,} lines in {len(found)} pieces. Beside them stand {wrong} wrong changes that a test notices."
    return f"# The method in an evening\n\n{OPENING}\n{ENTRY.sub(_set, TABLE)}\n## The end\n\n{end}\n"


def _set(match: re.Match[str]) -> str:
    """Set an entry: where it is, the words beside it, what it says of itself, its lines, and what would be wrong."""
    e, words = shown(match[1], match[2]), " ".join(match[3].split())
    place = f'<a href="cpt_core/{e.file}.html#L-{e.line}"><code>cpt_core/{e.file}</code>, line {e.line}</a>'
    wrong = "".join(f"- {m.what} (`tests/{'`, `tests/'.join(m.tests)}`)\n" for m in e.mutants)
    wrong = f"\nWrong, and a test notices:\n\n{wrong}" if wrong else ""
    code = f"```python\n{textwrap.dedent(e.source)}\n```"
    return f"\n### {e.name.replace('_', '&#95;')}\n\n{place}\n\n{words}\n\n{_said(e.doc)}{code}\n{wrong}\n"


def _said(doc: str) -> str:
    """Return a docstring as a quotation: code stays code, lists of arguments are lists, nothing else is markup."""
    said = []
    for part in doc.split("\n\n") if doc else ():
        lines, inside = part.splitlines(), SECTION.match(part)
        if part.startswith(">>>"):
            said += ["```python", *lines, "```", ""]
            continue
        listed = textwrap.dedent("\n".join(lines[1:])).splitlines() if inside else lines
        plain = [CODE.sub(lambda m: m[1] or f"\\{m[2]}", line.strip()) for line in listed]
        plain = [re.sub(r"^(Paper|Differs): ", r"**\1:** ", line) for line in plain]
        said += [lines[0], ""] if inside else []
        said += [plain[i] if not inside or line[:1] == " " else f"- {plain[i]}" for i, line in enumerate(listed)] + [""]
    return "".join(f"> {line}".rstrip() + "\n" for line in said) + "\n" * bool(said)
