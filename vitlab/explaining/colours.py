"""The palette of all pictures: the colours of Okabe and Ito, which colour-blind readers can distinguish."""

INK, GREY, RULE, PAPER = "#1b1e23", "#6e747c", "#d3d6da", "#fefefe"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#a1508e", "#b07d00", "#3b9bd1", "#7a4a2b")
BETTER, WORSE = "#009e74", "#d55e01"  #: one step off the series, so that a page can give them colours of their own
ALARM = "#cc3311"
