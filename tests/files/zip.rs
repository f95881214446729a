//! Archives and pickles as `torch.save` writes them, and wrong ones.

use super::Tensor;

/// One entry of an archive.
pub struct Entry {
    pub name: String,
    pub data: Vec<u8>,
    /// 0: stored; 8: deflated.
    pub method: u16,
    /// What the directory says of the size; its own where absent.
    pub size: Option<u32>,
    /// What the directory says of the place; its own where absent.
    pub offset: Option<u32>,
}

/// A stored entry.
pub fn entry(name: &str, data: &[u8]) -> Entry {
    Entry { name: name.to_owned(), data: data.to_vec(), method: 0, size: None, offset: None }
}

/// A zip archive of these entries.
pub fn archive(entries: &[Entry]) -> Vec<u8> {
    let (mut bytes, mut directory) = (Vec::new(), Vec::new());
    for e in entries {
        let at = bytes.len() as u32;
        let size = e.size.unwrap_or(e.data.len() as u32).to_le_bytes();
        let mut fixed = vec![20, 0, 0, 0];
        fixed.extend(e.method.to_le_bytes());
        fixed.extend([0; 8]);
        fixed.extend(size);
        fixed.extend(size);
        fixed.extend((e.name.len() as u16).to_le_bytes());
        fixed.extend([0, 0]);
        bytes.extend(b"PK\x03\x04");
        bytes.extend(&fixed);
        bytes.extend(e.name.as_bytes());
        bytes.extend(&e.data);
        directory.extend(b"PK\x01\x02\x14\0");
        directory.extend(&fixed);
        directory.extend([0; 10]);
        directory.extend(e.offset.unwrap_or(at).to_le_bytes());
        directory.extend(e.name.as_bytes());
    }
    let at = bytes.len() as u32;
    bytes.extend(&directory);
    bytes.extend(b"PK\x05\x06\0\0\0\0");
    bytes.extend((entries.len() as u16).to_le_bytes());
    bytes.extend((entries.len() as u16).to_le_bytes());
    bytes.extend((directory.len() as u32).to_le_bytes());
    bytes.extend(at.to_le_bytes());
    bytes.extend([0, 0]);
    bytes
}

/// The archive of one pickle and the storage `0`.
pub fn with_pickle(pickle: &[u8], storage: &[u8]) -> Vec<u8> {
    archive(&[entry("x/data.pkl", pickle), entry("x/byteorder", b"little"), entry("x/data/0", storage)])
}

/// One tensor as a pickle describes it.
#[derive(Clone)]
pub struct Described<'a> {
    pub name: &'a str,
    pub storage: &'a str,
    pub key: &'a str,
    pub n_stored: i64,
    pub offset: i64,
    pub shape: Vec<i64>,
    pub strides: Vec<i64>,
}

/// The pickle of a dictionary of tensors.
pub fn pickle(tensors: &[Described]) -> Vec<u8> {
    let mut p = b"\x80\x02}(".to_vec();
    for t in tensors {
        text(&mut p, t.name);
        p.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        text(&mut p, "storage");
        p.extend(format!("ctorch\n{}\n", t.storage).bytes());
        text(&mut p, t.key);
        text(&mut p, "cpu");
        int(&mut p, t.n_stored);
        p.extend(b"tQ");
        int(&mut p, t.offset);
        for list in [&t.shape, &t.strides] {
            p.push(b'(');
            list.iter().for_each(|n| int(&mut p, *n));
            p.push(b't');
        }
        p.extend(b"\x89ccollections\nOrderedDict\n)RtR");
    }
    p.extend(b"u.");
    p
}

fn text(p: &mut Vec<u8>, text: &str) {
    p.push(b'X');
    p.extend((text.len() as u32).to_le_bytes());
    p.extend(text.bytes());
}

fn int(p: &mut Vec<u8>, n: i64) {
    p.extend([0x8a, 8]);
    p.extend(n.to_le_bytes());
}

/// These tensors as `torch.save` would write them.
pub fn torch_save(tensors: &[Tensor]) -> Vec<u8> {
    let keys: Vec<_> = (0..tensors.len()).map(|i| i.to_string()).collect();
    let described: Vec<_> = tensors
        .iter()
        .zip(&keys)
        .map(|(t, key)| {
            let (storage, size) = match t.dtype.as_str() {
                "F32" => ("FloatStorage", 4),
                "BF16" => ("BFloat16Storage", 2),
                _ => ("HalfStorage", 2),
            };
            let mut strides = vec![1; t.shape.len()];
            for i in (1..strides.len()).rev() {
                strides[i - 1] = strides[i] * t.shape[i] as i64;
            }
            let shape = t.shape.iter().map(|n| *n as i64).collect();
            let n_stored = (t.bytes.len() / size) as i64;
            Described { name: &t.name, storage, key, n_stored, offset: 0, shape, strides }
        })
        .collect();
    let mut entries = vec![entry("m/data.pkl", &pickle(&described)), entry("m/byteorder", b"little")];
    entries.extend(tensors.iter().zip(&keys).map(|(t, key)| entry(&format!("m/data/{key}"), &t.bytes)));
    archive(&entries)
}
