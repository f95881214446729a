//! What the globals of the allow-list stand for, and what calling them would make.

use super::{Id, MAX_DIMS, Node, Reader, Refusal, StorageType, Tensor, broken, refused};
use crate::checkpoint::untrusted::shown;
use crate::dtype::DType;

/// The globals that may occur.
#[derive(Debug, Clone, Copy)]
pub(super) enum Global {
    OrderedDict,
    Size,
    RebuildTensor,
    RebuildParameter,
    RebuildFromType,
    /// A class that only says what a tensor was in Python.
    TensorClass,
    Storage(StorageType),
    /// A `torch.dtype`; it occurs as a value only.
    Dtype,
}

impl<'a> Reader<'a> {
    /// What the persistent id `id` stands for: a storage.
    pub(super) fn storage(&self, id: Id) -> Result<Node<'a>, Refusal> {
        let Node::Tuple(items) = &self.nodes[id] else {
            return Err(broken("persistent id: expected a tuple".to_owned()));
        };
        let nodes: Vec<&Node> = items.iter().take(6).map(|i| &self.nodes[*i]).collect();
        match nodes.as_slice() {
            [Node::Str("storage"), Node::Global(Global::Storage(kind)), Node::Str(key), Node::Str(_), Node::Int(n)]
                if *n >= 0 =>
            {
                Ok(Node::Storage { kind: *kind, key, n_stored: n.unsigned_abs() })
            }
            _ => Err(broken("persistent id: expected (`storage`, type, key, location, elements)".to_owned())),
        }
    }

    /// What calling the allowed global `function` with the tuple `args` would make.
    pub(super) fn call(&self, function: Id, args: Id) -> Result<Node<'a>, Refusal> {
        let Node::Global(global) = self.nodes[function] else {
            return Err(refused("call of something that is no global".to_owned()));
        };
        self.apply(global, args)
    }

    fn apply(&self, global: Global, args: Id) -> Result<Node<'a>, Refusal> {
        let Node::Tuple(args) = &self.nodes[args] else {
            return Err(broken("arguments: expected a tuple".to_owned()));
        };
        match (global, args.as_slice()) {
            (Global::OrderedDict, []) => Ok(Node::Dict(Vec::new())),
            (Global::Size, [items]) => match &self.nodes[*items] {
                Node::Tuple(items) if items.len() <= MAX_DIMS => Ok(Node::Tuple(items.clone())),
                _ => Err(broken(format!("`torch.Size`: expected a tuple of at most {MAX_DIMS} sizes"))),
            },
            // storage, offset, size, stride, requires_grad, hooks[, metadata]
            (
                Global::RebuildTensor,
                [storage, offset, shape, strides, _, _] | [storage, offset, shape, strides, _, _, _],
            ) => {
                let Node::Storage { kind, key, n_stored } = self.nodes[*storage] else {
                    return Err(broken("tensor: expected a storage".to_owned()));
                };
                let offset = self.count(*offset, "offset")?;
                let (shape, strides) = (self.counts(*shape, "shape")?, self.counts(*strides, "strides")?);
                if shape.len() != strides.len() {
                    return Err(broken(format!("tensor: {} sizes but {} strides", shape.len(), strides.len())));
                }
                Ok(Node::Tensor(Tensor { kind, key, n_stored, offset, shape, strides }))
            }
            // data, requires_grad, hooks
            (Global::RebuildParameter, [data, _, _]) => self.same_tensor(*data),
            // function, type, arguments, state
            (Global::RebuildFromType, [function, class, args, _]) => {
                match (&self.nodes[*function], &self.nodes[*class]) {
                    (
                        Node::Global(inner @ (Global::RebuildTensor | Global::RebuildParameter)),
                        Node::Global(Global::TensorClass),
                    ) => self.apply(*inner, *args),
                    _ => Err(refused("`_rebuild_from_type_v2` of something that is no tensor".to_owned())),
                }
            }
            _ => Err(refused(format!("call of {global:?} with {} arguments", args.len()))),
        }
    }

    fn same_tensor(&self, id: Id) -> Result<Node<'a>, Refusal> {
        match &self.nodes[id] {
            Node::Tensor(tensor) => Ok(Node::Tensor(tensor.clone())),
            _ => Err(broken("parameter: expected a tensor".to_owned())),
        }
    }

    fn count(&self, id: Id, what: &str) -> Result<u64, Refusal> {
        match self.nodes[id] {
            Node::Int(n) if n >= 0 => Ok(n.unsigned_abs()),
            Node::Int(n) => Err(broken(format!("tensor: {what}: expected a count, got {n}"))),
            _ => Err(broken(format!("tensor: {what}: expected an integer"))),
        }
    }

    fn counts(&self, id: Id, what: &str) -> Result<Vec<u64>, Refusal> {
        match &self.nodes[id] {
            Node::Tuple(items) if items.len() <= MAX_DIMS => items.iter().map(|i| self.count(*i, what)).collect(),
            _ => Err(broken(format!("tensor: {what}: expected a tuple of at most {MAX_DIMS} integers"))),
        }
    }
}

/// The allow-list.
pub(super) fn global(module: &str, name: &str) -> Result<Global, Refusal> {
    let storage = |dtype, size| Ok(Global::Storage(StorageType { dtype, size }));
    match (module, name) {
        ("collections", "OrderedDict") => Ok(Global::OrderedDict),
        ("torch", "Size") => Ok(Global::Size),
        ("torch._utils", "_rebuild_tensor_v2") => Ok(Global::RebuildTensor),
        ("torch._utils", "_rebuild_parameter") => Ok(Global::RebuildParameter),
        ("torch._tensor", "_rebuild_from_type_v2") => Ok(Global::RebuildFromType),
        ("torch", "Tensor") | ("torch.nn.parameter", "Parameter") => Ok(Global::TensorClass),
        ("torch", "FloatStorage") => storage(Ok(DType::F32), 4),
        ("torch", "HalfStorage") => storage(Ok(DType::F16), 2),
        ("torch", "BFloat16Storage") => storage(Ok(DType::Bf16), 2),
        ("torch", "IntStorage") => storage(Ok(DType::I32), 4),
        ("torch", "DoubleStorage") => storage(Err("double"), 8),
        ("torch", "LongStorage") => storage(Err("long"), 8),
        ("torch", "ShortStorage") => storage(Err("short"), 2),
        ("torch", "CharStorage") => storage(Err("char"), 1),
        ("torch", "ByteStorage") => storage(Err("byte"), 1),
        ("torch", "BoolStorage") => storage(Err("bool"), 1),
        (
            "torch",
            "float32" | "float16" | "bfloat16" | "float64" | "int8" | "int16" | "int32" | "int64" | "uint8" | "bool",
        ) => Ok(Global::Dtype),
        _ => Err(refused(format!("global `{}.{}` is not allowed; nothing was executed", shown(module), shown(name)))),
    }
}
