"""Owns quantised sources: each is seen as Kimi K2.6's own INT4 checkpoint.

In that view routed experts are INT4 and every other weight is bfloat16. A weight
whose source has it otherwise is a `DerivedTensor`, computed when it is read; what the
computation loses is said in a line. Decided by the tensors that are there, weight by
weight, so a source may mix formats.

Read `view.py` first. `marks.py` has what is refused by name.
"""

from convert.formats.config import int4_config_json
from convert.formats.marks import refuse_foreign_formats
from convert.formats.view import View, view_as_int4

__all__ = ["View", "int4_config_json", "refuse_foreign_formats", "view_as_int4"]
