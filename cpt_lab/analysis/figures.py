"""Figures of the paper by number, and two figures of rounding.

Figures 3, 4, 6 and 7 differ in the task of their runs alone.
"""

from cpt_lab.analysis.aggregation import figure_5 as figure_5
from cpt_lab.analysis.critical_periods import figure_8 as figure_8
from cpt_lab.analysis.quality_cost import figure_3
from cpt_lab.analysis.rounding import error_over_training as error_over_training
from cpt_lab.analysis.rounding import histograms as histograms
from cpt_lab.analysis.schedules import figure_2 as figure_2

figure_4 = figure_6 = figure_7 = figure_3
