"""What a metric is called and which colour a thing has, wherever it is shown."""

# Of each query, head and layer, by the names of analyses and of statistics while training.
METRICS = {
    "row_sum": "sum of weights per query",
    "first_token": "weight on the first token",
    "entropy": "entropy of p [nats]",
    "entropy_clipped": "entropy of max(w, 0), renormalised [nats]",
    "entropy_absolute": "entropy of |w|, renormalised [nats]",
    "sink_mass": "probability taken by the sink",
    "negative": "fraction of weights below zero",
    "mean_logit": "mean logit q·k / √d",
    "max_logit": "largest logit q·k / √d",
    "alpha": "mean α",
    "alpha_saturated": "fraction of tokens with α at an end",
    "alpha_ma": "moving average of α",
    "alpha_entropy": "correlation of α with entropy",
}
HISTOGRAMS = {"alpha": "α", "beta": "β", "beta_sum": "n β, what β adds to the sum of a row"}

# Okabe and Ito's colours, then Tol's muted ones: told apart by people who are colour-blind. The paper's three methods
# get the strongest contrast.
VARIANT_COLOURS = {
    "softmax": "#555555",
    "sink": "#E69F00",
    "affine": "#0072B2",
    "off_by_one": "#56B4E9",
    "gated": "#009E73",
    "gated_headwise": "#999933",
    "affine_sigmoid": "#CC79A7",
    "affine_gated": "#D55E00",
    "scale_invariant": "#332288",
    "logn": "#882255",
    "alibi": "#44AA99",
}
OTHER_VARIANT = "#661100"
# Of runs, in their order; readable on white and on black, and apart for the colour-blind (after Okabe and Ito).
RUN_COLOURS = ("#3d8bd9", "#e69f00", "#12a37c", "#e0662a", "#cc79a7", "#56b4e9", "#9b8bd9", "#8a8f98")

# Lines and words on white, and what is beside a scale of colours.
INK, NOTE, FAINT, GRID = "#222222", "#777777", "#999999", "#e4e4e4"
BELOW_ZERO, MISSING = "#d95f02", "#eeeeee"
