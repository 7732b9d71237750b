"""Who produces and who reads each channel: what folds into what."""

from ptq.graph.channelgraph import ChannelGraph
from ptq.graph.watch import read_graph

__all__ = ["ChannelGraph", "read_graph"]
