"""MoE backends behind one interface: a layer in, its output out."""
