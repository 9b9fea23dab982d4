"""Expert parallelism (ep): ranks with different samples distribute the experts of every mixture.

strategy          the technique, the plans that it rejects, and the wiring of a rank
mixture_finder    finds and checks the layers that are mixtures of experts
layers            the forward of such a layer: sends tokens to the ranks of their experts, and the results back
"""
