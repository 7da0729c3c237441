"""The CUDA target to compile MoE kernels for: the answer to MD004, for FlashInfer's and torch's settings.

    >>> resolve_arch((12, 0), (13, 0)).target
    '120f'

The choice of the suffix is that of FlashInfer 0.7.1 and later. The instructions behind it were tried
on ptxas 12.0 to 13.5; `moedoctor.diagnose.cuda.instructions` tries them on the compilers of this machine.
"""

from moedoctor.fixes.arch.lists import FLASHINFER_LIST as FLASHINFER_LIST
from moedoctor.fixes.arch.lists import TORCH_LIST as TORCH_LIST
from moedoctor.fixes.arch.lists import ArchListExplanation as ArchListExplanation
from moedoctor.fixes.arch.lists import ListProblem as ListProblem
from moedoctor.fixes.arch.lists import ListReading as ListReading
from moedoctor.fixes.arch.lists import explain_arch_list as explain_arch_list
from moedoctor.fixes.arch.lists import resolve_arch_list as resolve_arch_list
from moedoctor.fixes.arch.resolve import ArchDecision as ArchDecision
from moedoctor.fixes.arch.resolve import resolve_arch as resolve_arch
