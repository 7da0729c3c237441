import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.reference.agreement import Bounds, agree, relative_error
from moedoctor.reference.expert_cache import differ

BOUNDS = Bounds(cosine=0.999, norm=0.01, element=0.01, matched=0.99, worst=0.1)


def expected(tokens: int = 5, hidden: int = 128) -> torch.Tensor:
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(0))


def test_relative_errors_are_those_of_rows_and_infinite_if_a_row_is_not_finite() -> None:
    right = torch.tensor([[3.0, 4.0], [0.0, 2.0], [1.0, 1.0], [math.inf, 1.0], [0.0, 0.0]])
    output = torch.tensor([[3.0, 4.5], [0.0, 2.0], [1.0, math.nan], [math.inf, 1.0], [0.0, 0.0]])
    assert relative_error(output, right).tolist() == [pytest.approx(0.1), 0.0, math.inf, math.inf, 0.0]
    difference = differ(output, right)
    assert (difference.rows.tolist(), difference.worst) == ([True, False, True, True, False], math.inf)


def test_the_same_output_is_right_also_if_it_is_rounded_to_bfloat16() -> None:
    agreement = agree(expected(), expected(), BOUNDS)
    assert agreement.right
    assert agreement.wrong_tokens == 0
    assert (agreement.cosine, agreement.norm_ratio) == (pytest.approx(1), pytest.approx(1))
    assert (agreement.matched, agreement.error) == (1.0, 0.0)
    assert agree(expected().bfloat16(), expected(), BOUNDS).right


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_comes_first_and_the_rest_is_judged_without_it(value: float) -> None:
    broken = expected()
    broken[3, 7] = value
    agreement = agree(broken, expected(), BOUNDS)
    assert agreement.reason == "1 of 5 tokens hold NaN or Inf, the first is token 3"
    assert (agreement.first_nonfinite_token, agreement.wrong_tokens) == (3, 1)
    assert agreement.cosine == pytest.approx(1)
    agreement = agree(expected() * value, expected(), BOUNDS)
    assert agreement.reason == "every token holds NaN or Inf, the first is token 0"
    assert agreement.cosine is None


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-6])
def test_zeros_are_wrong_for_an_output_of_any_size(size: float) -> None:
    assert agree(torch.zeros(5, 128), expected() * size, BOUNDS).wrong_tokens == 5


def test_a_single_wrong_token_is_named() -> None:
    broken = expected(1000)
    broken[617] = broken[616]
    agreement = agree(broken, expected(1000), BOUNDS)
    assert not agreement.right
    assert agreement.wrong_tokens == 1
    assert agreement.cosine_token == agreement.error_token == 617


def test_one_element_is_found_and_named() -> None:
    # Too small for the token's cosine and norm, and within the share that may not match.
    broken, right = expected(3, 4096), expected(3, 4096)
    broken[1, 99] += 0.3 * (1 + right[1, 99].abs())
    agreement = agree(broken, right, BOUNDS)
    assert (agreement.error_token, agreement.error_element) == (1, 99)
    assert agreement.wrong_tokens == 1
    assert (agreement.reason or "").startswith("token 1, element 99: ")
    assert agreement.got == pytest.approx(float(broken[1, 99]))
    assert agreement.expected == pytest.approx(float(right[1, 99]))


def test_elements_that_do_not_match_are_counted_for_each_token() -> None:
    broken = expected(4, 1000)
    broken[2, :30] *= 1.04
    agreement = agree(broken, expected(4, 1000), BOUNDS)
    assert agreement.matched_token == 2
    assert 0.97 <= (agreement.matched or 0) < 0.99
    assert "match at token 2" in (agreement.reason or "")


def test_a_token_whose_output_is_zero_must_be_zero() -> None:
    right = expected()
    right[0] = 0
    assert agree(right, right, BOUNDS).right
    broken = right.clone()
    broken[0, 0] = 1e-3
    assert agree(broken, right, BOUNDS).wrong_tokens == 1


@given(st.floats(1e-6, 1e6), st.integers(1, 4))
def test_the_size_of_the_output_does_not_matter(size: float, bits: int) -> None:
    right = expected() * size
    noisy = right * (1 + torch.randn(5, 128, generator=torch.Generator().manual_seed(1)) * 2.0**-bits)
    assert agree(noisy, right, BOUNDS).right == agree(noisy / size, right / size, BOUNDS).right


@pytest.mark.parametrize("size", [1e-30, 1e19, 1e36])
@pytest.mark.parametrize("factor", [0.5, -1.0])
def test_sizes_whose_squares_overflow_in_float32_are_judged(size: float, factor: float) -> None:
    right = expected() * size
    assert agree(right, right, BOUNDS).right
    agreement = agree(right * factor, right, BOUNDS)
    assert agreement.wrong_tokens == 5
    assert (agreement.reason or "").startswith("norm ratio 0.5" if factor > 0 else "cosine -1.0")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reference_that_is_not_finite_passes_nothing(value: float) -> None:
    broken = expected()
    broken[2, 5] = value
    agreement = agree(expected(), broken, BOUNDS)
    assert agreement.wrong_tokens == 1
    assert agreement.reason == "cosine nan at token 2, expected at least 0.999"


def test_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected \[5, 128\]"):
        agree(expected(4), expected(), BOUNDS)
    with pytest.raises(ValueError, match="with a token"):
        agree(expected(0), expected(0), BOUNDS)
