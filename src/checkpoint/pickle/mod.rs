//! The few pickle opcodes that `torch.save` writes, as data: nothing is imported, called or executed.
//!
//! Opcodes: `Lib/pickletools.py` of CPython. What torch adds: persistent ids for storages (`torch/serialization.py`) and
//! the functions that put tensors together (`torch/_utils.py`). Every other global is refused by name.

mod calls;

use std::collections::HashMap;

use calls::{Global, global};

use crate::dtype::DType;
use crate::error::ErrorKind;

/// Most objects of one pickle: a few dozen a tensor.
const MAX_NODES: usize = 1 << 22;
/// Most entries of the memo, and its largest key.
const MAX_MEMO: usize = 1 << 22;
/// Most objects on the stack.
const MAX_STACK: usize = 1 << 20;
/// Most marks at once: how deep containers nest while they are written.
const MAX_MARKS: usize = 256;
/// Most dimensions of a tensor.
const MAX_DIMS: usize = 16;

/// A failure without the file's name.
pub(crate) type Refusal = (ErrorKind, String);

/// A node of [`Pickle`].
pub(crate) type Id = usize;

/// The element type of a storage: ours or the name of one that is not read, and the bytes of an element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StorageType {
    /// The type, if it is one we read.
    pub(crate) dtype: Result<DType, &'static str>,
    /// Bytes of one element.
    pub(crate) size: usize,
}

/// One tensor, not yet checked against its storage.
#[derive(Debug, Clone)]
pub(crate) struct Tensor<'a> {
    /// Element type of the storage.
    pub(crate) kind: StorageType,
    /// Key of the storage: the name of its file under `data/`.
    pub(crate) key: &'a str,
    /// Elements of the storage.
    pub(crate) n_stored: u64,
    /// First element of the tensor.
    pub(crate) offset: u64,
    /// Sizes, slowest dimension first.
    pub(crate) shape: Vec<u64>,
    /// Elements from one index to the next, for each dimension.
    pub(crate) strides: Vec<u64>,
}

/// One object.
#[derive(Debug)]
enum Node<'a> {
    /// A value that means nothing here.
    Other,
    Int(i64),
    Str(&'a str),
    Tuple(Vec<Id>),
    List,
    Dict(Vec<(Id, Id)>),
    Global(Global),
    Storage {
        kind: StorageType,
        key: &'a str,
        n_stored: u64,
    },
    Tensor(Tensor<'a>),
}

/// A pickle, read.
#[derive(Debug)]
pub(crate) struct Pickle<'a> {
    nodes: Vec<Node<'a>>,
    root: Id,
}

impl<'a> Pickle<'a> {
    /// Reads the pickle `bytes`, up to its end mark.
    pub(crate) fn read(bytes: &'a [u8]) -> Result<Self, Refusal> {
        let reader =
            Reader { bytes, at: 0, nodes: Vec::new(), stack: Vec::new(), marks: Vec::new(), memo: HashMap::new() };
        reader.run()
    }

    /// The outermost object.
    pub(crate) fn root(&self) -> Id {
        self.root
    }

    /// The entries of a dictionary; `None` when `id` is none.
    pub(crate) fn dict(&self, id: Id) -> Option<&[(Id, Id)]> {
        match &self.nodes[id] {
            Node::Dict(entries) => Some(entries),
            _ => None,
        }
    }

    /// The text of a string; `None` when `id` is none.
    pub(crate) fn text(&self, id: Id) -> Option<&'a str> {
        match self.nodes[id] {
            Node::Str(text) => Some(text),
            _ => None,
        }
    }

    /// The tensor; `None` when `id` is none.
    pub(crate) fn tensor(&self, id: Id) -> Option<&Tensor<'a>> {
        match &self.nodes[id] {
            Node::Tensor(tensor) => Some(tensor),
            _ => None,
        }
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    nodes: Vec<Node<'a>>,
    stack: Vec<Id>,
    marks: Vec<usize>,
    memo: HashMap<usize, Id>,
}

impl<'a> Reader<'a> {
    fn run(mut self) -> Result<Pickle<'a>, Refusal> {
        loop {
            let at = self.at;
            let [op] = self.array()?;
            let within = |(kind, message): Refusal| (kind, format!("pickle at byte {at}: {message}"));
            if op == b'.' {
                let root = self.pop().map_err(within)?;
                return Ok(Pickle { nodes: self.nodes, root });
            }
            self.step(op).map_err(within)?;
        }
    }

    fn step(&mut self, op: u8) -> Result<(), Refusal> {
        match op {
            // PROTO
            0x80 => {
                let [version] = self.array()?;
                if version > 5 {
                    return Err(broken(format!("expected protocol 5 or less, got {version}")));
                }
                Ok(())
            }
            // FRAME: a hint for buffering.
            0x95 => self.array::<8>().map(drop),
            b'(' if self.marks.len() >= MAX_MARKS => Err(broken(format!("more than {MAX_MARKS} marks"))),
            b'(' => {
                self.marks.push(self.stack.len());
                Ok(())
            }
            // None, true, false
            b'N' | 0x88 | 0x89 => self.push(Node::Other),
            b'G' => {
                self.array::<8>()?;
                self.push(Node::Other)
            }
            b'K' => self.int::<1>(),
            b'M' => self.int::<2>(),
            b'J' => {
                let n = i32::from_le_bytes(self.array()?);
                self.push(Node::Int(n.into()))
            }
            // LONG1: little-endian two's complement.
            0x8a => {
                let n = usize::from(self.array::<1>()?[0]);
                let bytes = self.take(n)?;
                if n > 8 {
                    return Err(broken(format!("integer of {n} bytes")));
                }
                let sign = if bytes.last().is_some_and(|b| b & 0x80 != 0) { 0xff } else { 0 };
                let mut whole = [sign; 8];
                whole[..n].copy_from_slice(bytes);
                self.push(Node::Int(i64::from_le_bytes(whole)))
            }
            // SHORT_BINUNICODE, BINUNICODE, BINUNICODE8
            0x8c => self.string::<1>(),
            b'X' => self.string::<4>(),
            0x8d => self.string::<8>(),
            b'}' => self.push(Node::Dict(Vec::new())),
            b']' => self.push(Node::List),
            b')' => self.push(Node::Tuple(Vec::new())),
            0x85..=0x87 => {
                let items = self.pop_n(usize::from(op - 0x84))?;
                self.push(Node::Tuple(items))
            }
            b't' => {
                let items = self.pop_mark()?;
                self.push(Node::Tuple(items))
            }
            // APPEND, APPENDS: no list holds anything we look for.
            b'a' => self.pop().and_then(|_| self.top_list()),
            b'e' => self.pop_mark().and_then(|_| self.top_list()),
            b's' => {
                let items = self.pop_n(2)?;
                self.set_items(&items)
            }
            b'u' => {
                let items = self.pop_mark()?;
                self.set_items(&items)
            }
            b'q' => {
                let key = self.length::<1>()?;
                self.memoise(key)
            }
            b'r' => {
                let key = self.length::<4>()?;
                self.memoise(key)
            }
            0x94 => self.memoise(self.memo.len()),
            b'h' => {
                let key = self.length::<1>()?;
                self.recall(key)
            }
            b'j' => {
                let key = self.length::<4>()?;
                self.recall(key)
            }
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.push(Node::Global(global(module, name)?))
            }
            // STACK_GLOBAL
            0x93 => {
                let items = self.pop_n(2)?;
                let [Node::Str(module), Node::Str(name)] = [&self.nodes[items[0]], &self.nodes[items[1]]] else {
                    return Err(broken("expected two strings for a global".to_owned()));
                };
                let global = global(module, name)?;
                self.push(Node::Global(global))
            }
            b'Q' => {
                let id = self.pop()?;
                let storage = self.storage(id)?;
                self.push(storage)
            }
            b'R' => {
                let items = self.pop_n(2)?;
                let made = self.call(items[0], items[1])?;
                self.push(made)
            }
            // BUILD: attributes of a dictionary or tensor, which are no weights.
            b'b' => {
                self.pop()?;
                match self.top()? {
                    Node::Dict(_) | Node::Tensor(_) => Ok(()),
                    _ => Err(refused("expected state of a dictionary or tensor only".to_owned())),
                }
            }
            other => Err(refused(format!("opcode 0x{other:02x} is not allowed"))),
        }
    }

    fn push(&mut self, node: Node<'a>) -> Result<(), Refusal> {
        if self.nodes.len() >= MAX_NODES {
            return Err(broken(format!("more than {MAX_NODES} objects")));
        }
        self.nodes.push(node);
        self.push_id(self.nodes.len() - 1)
    }

    fn push_id(&mut self, id: Id) -> Result<(), Refusal> {
        if self.stack.len() >= MAX_STACK {
            return Err(broken(format!("more than {MAX_STACK} objects on the stack")));
        }
        self.stack.push(id);
        Ok(())
    }

    /// The last `n` objects, none of them below the last mark.
    fn pop_n(&mut self, n: usize) -> Result<Vec<Id>, Refusal> {
        let floor = self.marks.last().copied().unwrap_or(0);
        match self.stack.len().checked_sub(n).filter(|from| *from >= floor) {
            Some(from) => Ok(self.stack.split_off(from)),
            None => Err(broken("stack underflow".to_owned())),
        }
    }

    fn pop(&mut self) -> Result<Id, Refusal> {
        Ok(self.pop_n(1)?[0])
    }

    /// Everything above the last mark, which goes too.
    fn pop_mark(&mut self) -> Result<Vec<Id>, Refusal> {
        // Nothing pops below the last mark, so it is never beyond the stack.
        let from = self.marks.pop().ok_or_else(|| broken("no mark on the stack".to_owned()))?;
        Ok(self.stack.split_off(from))
    }

    fn top_id(&self) -> Result<Id, Refusal> {
        self.stack.last().copied().ok_or_else(|| broken("stack underflow".to_owned()))
    }

    fn top(&self) -> Result<&Node<'a>, Refusal> {
        Ok(&self.nodes[self.top_id()?])
    }

    fn top_list(&self) -> Result<(), Refusal> {
        match self.top()? {
            Node::List => Ok(()),
            _ => Err(broken("expected a list to append to".to_owned())),
        }
    }

    /// Keys and values, in turn, for the dictionary on top of the stack.
    fn set_items(&mut self, items: &[Id]) -> Result<(), Refusal> {
        let top = self.top_id()?;
        let Node::Dict(entries) = &mut self.nodes[top] else {
            return Err(broken("expected a dictionary to set items of".to_owned()));
        };
        let (pairs, []) = items.as_chunks::<2>() else {
            return Err(broken("expected a value for each key".to_owned()));
        };
        entries.extend(pairs.iter().map(|[key, value]| (*key, *value)));
        Ok(())
    }

    fn memoise(&mut self, key: usize) -> Result<(), Refusal> {
        if key >= MAX_MEMO {
            return Err(broken(format!("memo: expected keys below {MAX_MEMO}, got {key}")));
        }
        let top = self.top_id()?;
        self.memo.insert(key, top);
        Ok(())
    }

    fn recall(&mut self, key: usize) -> Result<(), Refusal> {
        match self.memo.get(&key) {
            Some(id) => self.push_id(*id),
            None => Err(broken(format!("memo: nothing under {key}"))),
        }
    }

    fn int<const N: usize>(&mut self) -> Result<(), Refusal> {
        let n = self.length::<N>()?;
        self.push(Node::Int(n as i64))
    }

    fn string<const N: usize>(&mut self) -> Result<(), Refusal> {
        let n = self.length::<N>()?;
        let bytes = self.take(n)?;
        let text = std::str::from_utf8(bytes).map_err(|e| broken(format!("string: {e}")))?;
        self.push(Node::Str(text))
    }

    /// A little-endian number of N bytes.
    fn length<const N: usize>(&mut self) -> Result<usize, Refusal> {
        let n = self.array::<N>()?.iter().rev().fold(0u64, |n, b| n << 8 | u64::from(*b));
        usize::try_from(n).map_err(|_| broken(format!("length {n} overflows")))
    }

    fn line(&mut self) -> Result<&'a str, Refusal> {
        let rest = &self.bytes[self.at..];
        let n = rest.iter().position(|b| *b == b'\n').ok_or_else(truncated)?;
        self.at += n + 1;
        std::str::from_utf8(&rest[..n]).map_err(|e| broken(format!("global: {e}")))
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Refusal> {
        let array = *self.bytes[self.at..].first_chunk::<N>().ok_or_else(truncated)?;
        self.at += N;
        Ok(array)
    }

    fn take(&mut self, n: usize) -> Result<&'a [u8], Refusal> {
        let bytes = self.bytes[self.at..].get(..n).ok_or_else(truncated)?;
        self.at += n;
        Ok(bytes)
    }
}

fn broken(message: String) -> Refusal {
    (ErrorKind::Format, message)
}

fn refused(message: String) -> Refusal {
    (ErrorKind::Unsupported, message)
}

fn truncated() -> Refusal {
    broken("truncated pickle".to_owned())
}
