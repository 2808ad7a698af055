"""A stand-in for PyTorch Geometric, where it is not installed: the float32 layers of it that have a quantised form.

Their parameters, arguments and numbers are those of version 2.8; nothing else of the library is here.
"""

import sys
from types import ModuleType

import torch
from torch import nn


def add_remaining_self_loops(edge_index, edge_attr=None, fill_value=1.0, num_nodes=None):
    loops, others = torch.arange(num_nodes), edge_index[:, edge_index[0] != edge_index[1]]
    return torch.cat([others, torch.stack([loops, loops])], 1), edge_attr


def gcn_norm(edge_index, edge_weight, num_nodes, improved, add_self_loops, flow, dtype):
    if add_self_loops:
        assert edge_weight is None, "the stand-in adds loops to plain edges alone"
        edge_index, _ = add_remaining_self_loops(edge_index, None, 1.0, num_nodes)
    weight = torch.ones(edge_index.shape[1], dtype=dtype) if edge_weight is None else edge_weight
    degrees = weight.new_zeros(num_nodes).index_add_(0, edge_index[1], weight)
    factor = degrees.pow(-0.5).masked_fill(degrees == 0, 0)
    return edge_index, factor[edge_index[0]] * weight * factor[edge_index[1]]


class Linear(nn.Module):
    def __init__(self, inside, out, bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, inside) / inside**0.5)
        self.bias = nn.Parameter(torch.randn(out)) if bias else None

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


class MessagePassing(nn.Module):
    explain = None

    def __init__(self, aggr="add", *, flow="source_to_target", node_dim=-2):
        super().__init__()
        self.aggr, self.flow, self.node_dim = aggr, flow, node_dim
        self._message_forward_hooks = {}

    def propagate(self, edge_index, x, size=None, edge_weight=None):
        x, destinations = x if isinstance(x, tuple) else (x, None)
        count = size[1] if size else len(x if destinations is None else destinations)
        messages = x[edge_index[0]] if edge_weight is None else x[edge_index[0]] * edge_weight[:, None]
        out = x.new_zeros(count, x.shape[1]).index_add_(0, edge_index[1], messages)
        if self.aggr != "mean":
            return out
        degrees = out.new_zeros(count).index_add_(0, edge_index[1], out.new_ones(edge_index.shape[1]))
        return out / degrees.clamp_min(1)[:, None]

    aggregate = None


class GCNConv(MessagePassing):
    def __init__(self, inside, out, improved=False, cached=False, add_self_loops=None, normalize=True, **more):
        super().__init__(**more)
        self.improved, self.cached, self.normalize = improved, cached, normalize
        self.add_self_loops = normalize if add_self_loops is None else add_self_loops
        self._cached_edge_index = self._cached_adj_t = None
        self.lin, self.bias = Linear(inside, out, bias=False), nn.Parameter(torch.randn(out))

    def forward(self, x, edge_index, edge_weight=None):
        if self.normalize:
            more = len(x), self.improved, self.add_self_loops, self.flow, x.dtype
            edge_index, edge_weight = gcn_norm(edge_index, edge_weight, *more)
        return self.propagate(edge_index, x=self.lin(x), edge_weight=edge_weight) + self.bias


class SAGEConv(MessagePassing):
    def __init__(self, inside, out, aggr="mean", normalize=False, root_weight=True, project=False, **more):
        super().__init__(aggr, **more)
        self.normalize, self.root_weight, self.project = normalize, root_weight, project
        of_source, own = inside if isinstance(inside, tuple) else (inside, inside)
        self.lin_l, self.lin_r = Linear(of_source, out), Linear(own, out, bias=False)

    def forward(self, x, edge_index, size=None):
        x = x if isinstance(x, tuple) else (x, x)
        out = self.lin_l(self.propagate(edge_index, x=x, size=size)) + self.lin_r(x[1])
        return nn.functional.normalize(out, dim=-1) if self.normalize else out


class GraphConv(MessagePassing):
    def __init__(self, inside, out, aggr="add", **more):
        super().__init__(aggr, **more)
        self.lin_rel, self.lin_root = Linear(inside, out), Linear(inside, out, bias=False)

    def forward(self, x, edge_index, edge_weight=None, size=None):
        x = x if isinstance(x, tuple) else (x, x)
        summed = self.propagate(edge_index, x=x, size=size, edge_weight=edge_weight)
        return self.lin_rel(summed) + self.lin_root(x[1])


class SGConv(MessagePassing):
    def __init__(self, inside, out):
        super().__init__()
        self.lin = Linear(inside, out)

    def forward(self, x, edge_index):
        return self.lin(self.propagate(edge_index, x=x))


def modules():
    """Return the modules of the library that hold these, by name."""
    root, nn_, utils = (ModuleType(f"torch_geometric{name}") for name in ("", ".nn", ".utils"))
    root.nn, nn_.Linear, utils.add_remaining_self_loops = nn_, Linear, add_remaining_self_loops
    found = {m.__name__: m for m in (root, nn_, utils, ModuleType("torch_geometric.nn.conv"))}
    for kind, file in ((GCNConv, "gcn"), (SAGEConv, "sage"), (GraphConv, "graph"), (SGConv, "sg")):
        kind.__module__ = f"torch_geometric.nn.conv.{file}_conv"
        found[kind.__module__] = ModuleType(kind.__module__)
        for module in (nn_, found[kind.__module__]):
            setattr(module, kind.__name__, kind)
    found["torch_geometric.nn.conv.gcn_conv"].gcn_norm = gcn_norm
    return {name: module for name, module in found.items() if name not in sys.modules}
