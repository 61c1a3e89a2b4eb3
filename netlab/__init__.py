"""netlab: the network paths of several CNIs in one cluster, as real kernel objects on one host."""
