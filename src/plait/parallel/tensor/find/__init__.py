"""Search for the column- and row-parallel slices of any model.

finder            proposes slices for every pair of linear layers, and checks them
repeated_layers   searches a few of many equal layers, and copies the result to the others
linear_maps       finds linear layers, and the dims along which they can be sharded
dataflow_trace    runs the model once, and records the linear layers that each tensor was computed from
propose           computes which elements of the columns each rank needs for its slice of a row layer
replayed_module   compares the code on a rank's slice with the full code, in float64
"""
