"""Terms of art in one line: every page that shows a figure explains it in these words."""

import re

TERMS = {
    "loss": "the mean negative log-likelihood of the next token",
    "train_loss": "the loss of training batches, the mean of the last steps",
    "loss_after": "the validation loss after that share of the steps",
    "tokens": "what this model was trained on, as often as it read it",
    "all_tokens": "those of all rounds of growth, of models that were thrown away too",
    "loss_over_training": "the mean of the evaluations after the start: lower converges faster",
    "relative_loss": "smoothed over steps; below zero is better than the baseline",
    "excess_loss": "the loss above that of a model that knows the task, in nats",
    "validation_loss": "the mean negative log-likelihood of the next token, in nats (1 nat is 1.44 "
    "bits), on text that was held out",
    "parity": "a loss that is not above the reference's on the same tokens",
    "perplexity": "exp(loss): the equally likely tokens that the model in effect chooses among",
    "bits_per_byte": "the loss in bits over the text's bytes: it compares tokenizers that differ",
    "acc_norm": "the share of questions whose right answer is likeliest per character",
    "prefill": "tokens of a prompt read in a second, until the first new one is known",
    "decode": "tokens written in a second after that, one at a time",
    "cache": "the keys and values that are kept of every token read",
    "first_key_share": "(query, head) pairs whose largest weight is the first token's: a sink",
    "first_key_mass": "the mean share of its attention that a query gives the first token",
    "stored_prefix_mass": "the attention that a cure's stored prefix takes over",
    "bos_mass": "the mean share of its attention that a query gives BOS, the text's first token",
    "bos_mass_other": "the mean attention on BOS of queries at which the task asks for "
    "nothing: a dormant head parks there",
    "bos_mass_trigger": "the mean attention on BOS of queries at which a copy is due: an active "
    "head looks elsewhere",
    "rank": "singular values that hold most of a head's energy (τ of it, usually 0.9), the largest "
    "head's; where it is small (usually 1 or 2) the layer is lazy: it mixes tokens alike for all "
    "queries",
    "median_head_rank": "singular values that hold most of a head's energy",
    "heads_near_rank_1": "heads that give every query the same mixture",
    "near_rank": "heads that give every query the same mixture: their rank is usually 1 or 2",
    "row_0": "the first query, which sees the first token alone and gives it all: "
    "with it a share is never zero",
    "ill": "heads with nothing to do park on the first token (attention sinks), all heads of a "
    "layer mix alike (lazy layers), or a few channels dwarf the others (outliers)",
    "well": "none of that is found: no sinks, lazy layers, drained values or outliers",
    "lazy": "a layer is lazy where all its heads give every query the same mixture",
    "mean_attention": "rows are queries, columns keys; a sink is a bright column",
    "attention_of_layers": "rows are queries, columns keys, each a fraction of the sequence",
    "entropy": "how evenly attention falls on tokens; low means on few",
    "importance": "the mean attention that all queries give a token",
    "top_importance": "the mean attention of the tokens that have most of it",
    "value_drain": "value drain: a sink's value shrinks so that attending to it adds nothing",
    "value_eigenvalue": "how strongly the values point one way",
    "generated_eigenvalue": "the same of values before a route mixes them",
    "value_norm_at": "a sink's value is far shorter than the others'",
    "residual_peak": "residual peak: how far the first token's hidden state outgrows the others",
    "hidden_norm_at": "a residual peak is a hidden state that outgrows the others",
    "hidden_magnitude": "a bright column is an outlier channel, a bright row a token with a large "
    "state",
    "kurtosis": "how far a few channels dominate a hidden state; a Gaussian has 3",
    "kurtosis_rest": "how far a few channels dominate the hidden states of all tokens but the "
    "first: what makes quantization lossy",
    "max_activation": "the largest channel of a hidden state",
    "max_activation_first": "the largest channel of the first token's hidden state",
    "max_activation_rest": "the largest channel of each token but the first, on average",
    "norm_ratio": "the share of a hidden state's energy in its largest channel",
    "outlier_weight_share": "of the channels with the largest activations, how many also have the "
    "largest weights; of channels drawn at random hardly any do",
    "outlier_channel_overlap": "of the channels with the largest activations, how many are the "
    "same in another sequence",
    "token_similarity": "near 1 the tokens' states are alike: over-smoothing",
    "block_influence": "1 − cos of a block's input and output; near 0 it changes little",
    "influence": "1 − cos of a block's input and output; near 0 it changes little",
    "angular_distance": "the angle by which a block turns the last token's state",
    "angle": "the angle by which a layer turns the last token's state",
    "mass": "columns that hold most of a head's energy (τ, usually 0.9), mean over heads",
    "mapping_cosine": "how near this comes to attending to the layer before as well; 1 is the same "
    "direction",
    "query_gradient": "how much training still moves the weights",
    "key_gradient": "how much training still moves the weights",
    "damage": "how much the loss rises when the trained model's weights are quantized, in nats",
    "increase": "how much perplexity rises when the trained model is quantized",
    "kl": "how far the predictions move from the full-precision model's, in nats; 0 is not at all",
    "relative_error": "‖quantized − full‖ / ‖full‖ of an output",
    "crossing": "the step from which the training loss never falls below the baseline's again",
    "ahead": "the share of steps at which the smoothed training loss is below the baseline's",
    "mean_domain_loss": "the loss, the mean over the text's domains, each counted alike",
    "parameter_saving": "the share of parameters saved at equal loss: how far apart the lines of "
    "loss over size lie",
    "data_saving": "the share of steps saved until the baseline's last training loss; negative if "
    "the baseline saves steps until the row's",
    "acc": "the share of questions whose right answer is the model's likeliest",
    "mean_of": "the mean of the shares of questions answered right, task by task",
    "tasks_kept": "the tasks on which the heir has nine tenths or more of its reference's score, "
    "or more than two other models of its size",
    "step_milliseconds": "the median time of a training step",
    "cache_bytes": "bytes of keys and values that generation keeps a token",
}  # fmt: skip
"""By a figure's or metric's name, or what it begins with."""


def explain(name: str) -> str:
    """Return the glossary's line for a figure; "" for a name without one.

    `name` may be a figure, a figure with suffixes ("kurtosis_first"), or a chart's expression with
    a parameter metric, figure or curve, which is looked up ("chart(metric='kurtosis')").
    """
    quoted_parameter = re.search(r"(?:metric|figure|curve)=(['\"])(.+?)\1", name)
    figure = re.split("[@(]", quoted_parameter[2] if quoted_parameter else name)[0]
    while figure and figure not in TERMS:  # drop one suffix after the other
        figure = figure.rpartition("_")[0]
    return TERMS.get(figure, "")
