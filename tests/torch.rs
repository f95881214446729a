//! Files of `torch.save`: what torch wrote is read as it is, and everything else is refused without a panic.

mod files;

use files::zip::{Described, archive, entry, pickle, torch_save, with_pickle};
use files::{TINY, Table, data, folder, read, tiny};
use proptest::prelude::*;
use wgmoe::adapter::Adapter;
use wgmoe::checkpoint::{Checkpoint, Shards, TorchFile};
use wgmoe::dtype::DType;
use wgmoe::{ErrorKind, Result};

fn open(bytes: &[u8]) -> Result<TorchFile> {
    let dir = folder(&[("x.bin", bytes.to_vec())]);
    TorchFile::open(&dir.path().join("x.bin"))
}

#[test]
fn every_kind_of_tensor_that_torch_saves() {
    let mut table = Table::default();
    for name in ["kinds.pt", "kinds_protocol4.pt", "nested.pt"] {
        let file = TorchFile::open(&data("torch").join(name)).unwrap();
        assert_eq!(file.names().len(), 13, "{name}");
        let count = |n: usize| (0..n).map(|i| i as f32).collect::<Vec<_>>();
        let good: [(&str, DType, &[usize], Vec<f32>); 8] = [
            ("f32", DType::F32, &[3, 4], count(12)),
            ("view_tail", DType::F32, &[4], vec![8.0, 9.0, 10.0, 11.0]),
            ("scalar", DType::F32, &[], vec![2.5]),
            ("empty", DType::F32, &[0, 4], vec![]),
            ("f16", DType::F16, &[4], count(4)),
            ("bf16", DType::Bf16, &[4], count(4)),
            ("i32", DType::I32, &[3], count(3)),
            ("parameter", DType::F32, &[2, 3], vec![1.0; 6]),
        ];
        assert_eq!(file.bytes_read(), 0);
        let mut n_read = 0;
        for (tensor, dtype, shape, values) in good {
            let view = file.tensor(tensor).unwrap();
            let ok = (view.dtype, view.shape) == (dtype, shape) && view.to_f32() == values;
            n_read += (values.len() * dtype.size()) as u64;
            table.holds(&format!("{name} {tensor}"), ok && file.bytes_read() == n_read, view);
        }
        // A column of one row is contiguous either way round.
        for (tensor, part) in [("transposed", ".contiguous()"), ("strided", "[2]"), ("i64", "long"), ("bools", "bool")]
        {
            table.fails(tensor, file.tensor(tensor), ErrorKind::Unsupported, &[name, tensor, part]);
        }
        table.holds("row", file.tensor("row").is_ok_and(|v| v.shape == [4, 1]), "refused");
        table.fails("no such tensor", file.tensor("x"), ErrorKind::Tensor, &[name, "`x`"]);
    }
    let file = TorchFile::open(&data("torch/state_dict.pt")).unwrap();
    assert_eq!(file.names().collect::<Vec<_>>(), ["bias", "weight"]);
    table.finish();
}

#[test]
fn shards_with_an_index_and_a_single_file() {
    let shards = Shards::open(&data("torch/sharded")).unwrap();
    assert_eq!(shards.names().collect::<Vec<_>>(), ["a_w", "b_w"]);
    assert_eq!(shards.tensor("b_w").unwrap().to_f32(), [0.0, 1.0, 2.0, 3.0]);
    assert_eq!(shards.bytes_read(), 16);

    let config = std::fs::read(data(TINY).join("config.json")).unwrap();
    let tensors = read(&data(TINY).join("model.safetensors"));
    let dir = folder(&[("config.json", config), ("pytorch_model.bin", torch_save(&tensors))]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.names().len(), tensors.len());
    for t in &tensors {
        assert_eq!(checkpoint.tensor(&t.name).unwrap().all(), t.bytes, "{}", t.name);
    }
}

#[test]
fn an_adapter_is_the_same_from_either_format() {
    let want = Adapter::open(&data(TINY).join("adapters/attn_only"), &tiny()).unwrap();
    let got = Adapter::open(&data("torch/adapter"), &tiny()).unwrap();
    assert_eq!((got.factors.len(), got.bytes_read), (want.factors.len(), want.bytes_read));
    let same = got.factors.iter().zip(&want.factors).all(|(g, w)| {
        (g.place(), g.rank, g.scale.to_bits(), &g.a, &g.b) == (w.place(), w.rank, w.scale.to_bits(), &w.a, &w.b)
    });
    assert!(same);
}

#[test]
fn hostile_pickles_are_refused() {
    use ErrorKind::{Format, Unsupported};
    let good = Described {
        name: "w",
        storage: "FloatStorage",
        key: "0",
        n_stored: 8,
        offset: 0,
        shape: vec![2, 4],
        strides: vec![4, 1],
    };
    let described = |d: Described| pickle(&[d]);
    let max = i64::MAX;
    let cut = pickle(std::slice::from_ref(&good));
    let deep = [b"\x80\x02".to_vec(), vec![b'('; 1000], b".".to_vec()].concat();
    let many = [b"\x80\x02(".to_vec(), vec![b'}'; (1 << 20) + 1], b".".to_vec()].concat();
    let grown = [b"\x80\x02}q\x00".to_vec(), b"h\x000".repeat(3), b".".to_vec()].concat();
    let cases: Vec<(&str, Vec<u8>, ErrorKind, &str)> = vec![
        ("os.system", b"\x80\x02cos\nsystem\n(X\x04\0\0\0trueeR.".to_vec(), Unsupported, "os.system"),
        ("stack global", b"\x80\x04\x8c\x05posix\x8c\x06system\x93.".to_vec(), Unsupported, "posix.system"),
        ("builtins", b"\x80\x02cbuiltins\neval\n(X\x01\0\0\x001tR.".to_vec(), Unsupported, "builtins.eval"),
        ("module", std::fs::read(data("torch/module.pkl")).unwrap(), Unsupported, "torch.nn.modules.linear.Linear"),
        ("storage called", b"\x80\x02ctorch\nFloatStorage\n)R.".to_vec(), Unsupported, "call"),
        ("string called", b"\x80\x02X\x01\0\0\0a)R.".to_vec(), Unsupported, "no global"),
        ("state of a string", b"\x80\x02X\x01\0\0\0a}b.".to_vec(), Unsupported, "state"),
        ("INST", b"\x80\x02(ios\nsystem\n.".to_vec(), Unsupported, "opcode 0x69"),
        ("OBJ", b"\x80\x02(cos\nsystem\no.".to_vec(), Unsupported, "os.system"),
        ("NEWOBJ", b"\x80\x02ccollections\nOrderedDict\n)\x81.".to_vec(), Unsupported, "opcode 0x81"),
        ("extension", b"\x80\x02\x82\x01.".to_vec(), Unsupported, "opcode 0x82"),
        ("protocol", b"\x80\x06.".to_vec(), Format, "protocol"),
        ("empty", vec![], Format, "truncated"),
        ("truncated", cut[..cut.len() - 1].to_vec(), Format, "truncated"),
        ("truncated string", b"\x80\x02X\xff\xff\xff\xff.".to_vec(), Format, "truncated"),
        ("huge string", b"\x80\x02\x8d\xff\xff\xff\xff\xff\xff\xff\xff.".to_vec(), Format, "truncated"),
        ("global without end", b"\x80\x02ctorch".to_vec(), Format, "truncated"),
        ("underflow", b"\x80\x02R.".to_vec(), Format, "underflow"),
        ("underflow below a mark", b"\x80\x02}(s.".to_vec(), Format, "underflow"),
        ("nothing", b"\x80\x02.".to_vec(), Format, "underflow"),
        ("no mark", b"\x80\x02}u.".to_vec(), Format, "no mark"),
        ("key without value", b"\x80\x02}(}u.".to_vec(), Format, "value for each key"),
        ("items of a list", b"\x80\x02]}}s.".to_vec(), Format, "dictionary"),
        ("append to nothing", b"\x80\x02}a.".to_vec(), Format, "underflow"),
        ("append to a dictionary", b"\x80\x02}}a.".to_vec(), Format, "list"),
        ("huge memo", b"\x80\x02}r\xff\xff\xff\xff.".to_vec(), Format, "memo"),
        ("empty memo", b"\x80\x02h\x05.".to_vec(), Format, "memo"),
        ("deep", deep, Format, "marks"),
        ("stack", many, Format, "stack"),
        ("POP", grown, Unsupported, "opcode 0x30"),
        ("string bytes", b"\x80\x02\x8c\x01\xff.".to_vec(), Format, "string"),
        ("long integer", b"\x80\x02\x8a\x09\0\0\0\0\0\0\0\0\0.".to_vec(), Format, "9 bytes"),
        ("persistent id", b"\x80\x02}Q.".to_vec(), Format, "persistent id"),
        ("a list", b"\x80\x02].".to_vec(), Unsupported, "dictionary"),
        ("number as key", b"\x80\x02}K\x01K\x02s.".to_vec(), Unsupported, "strings"),
        ("number as tensor", b"\x80\x02}X\x01\0\0\0aK\x02s.".to_vec(), Unsupported, "`a`"),
        ("twice", pickle(&[good.clone(), good.clone()]), Format, "twice"),
        ("no storage", described(Described { key: "7", ..good.clone() }), Format, "`7`"),
        ("storage outside", described(Described { key: "../0", ..good.clone() }), Format, "not in the archive"),
        ("unknown storage", described(Described { storage: "X", ..good.clone() }), Unsupported, "torch.X"),
        ("storage size", described(Described { n_stored: 9, ..good.clone() }), Format, "expected 36 bytes"),
        ("huge storage", described(Described { n_stored: max, ..good.clone() }), Format, "overflow"),
        ("negative storage", described(Described { n_stored: -8, ..good.clone() }), Format, "elements"),
        ("offset", described(Described { offset: 1, ..good.clone() }), Format, "leaves its storage"),
        ("huge offset", described(Described { offset: max, ..good.clone() }), Format, "`w`"),
        ("negative offset", described(Described { offset: -1, ..good.clone() }), Format, "offset"),
        ("shape", described(Described { shape: vec![3, 4], ..good.clone() }), Format, "leaves its storage"),
        ("huge shape", described(Described { shape: vec![max, max], ..good.clone() }), Format, "overflow"),
        ("negative shape", described(Described { shape: vec![-1, -8], ..good.clone() }), Format, "shape"),
        ("huge strides", described(Described { strides: vec![max, max], ..good.clone() }), Format, "overflow"),
        ("negative strides", described(Described { strides: vec![-4, 1], ..good.clone() }), Format, "strides"),
        ("ranks", described(Described { strides: vec![1], ..good.clone() }), Format, "strides"),
        (
            "dimensions",
            described(Described { shape: vec![1; 17], strides: vec![1; 17], ..good.clone() }),
            Format,
            "at most 16",
        ),
    ];
    let mut table = Table::default();
    for (case, pickle, kind, part) in cases {
        table.fails(case, open(&with_pickle(&pickle, &[0; 32])), kind, &[part, "x.bin"]);
    }
    let file = open(&with_pickle(&pickle(std::slice::from_ref(&good)), &[0; 32])).unwrap();
    table.holds("good", file.tensor("w").is_ok_and(|v| v.shape == [2, 4] && v.n_bytes() == 32), "refused");
    // One element, seen a billion times.
    let expanded = Described { shape: vec![1 << 30], strides: vec![0], ..good };
    let file = open(&with_pickle(&pickle(&[expanded]), &[0; 32])).unwrap();
    table.fails("expanded", file.tensor("w"), ErrorKind::Unsupported, &["contiguous"]);
    table.finish();
}

#[test]
fn hostile_archives_are_refused() {
    use ErrorKind::{Format, Unsupported};
    let good = std::fs::read(data("torch/kinds.pt")).unwrap();
    let with = |name: &str| archive(&[entry("x/data.pkl", b"\x80\x02}."), entry(name, b"1234")]);
    let mut deflated = entry("x/data/0", b"12");
    deflated.method = 8;
    let mut outside = entry("x/data/0", b"12");
    outside.size = Some(1 << 30);
    let mut beyond = entry("x/data/0", b"12");
    beyond.offset = Some(u32::MAX - 1);
    let mut overlap = entry("x/data/0", b"12");
    overlap.offset = Some(0);
    overlap.size = Some(4);
    let and = |e| archive(&[entry("x/data.pkl", b"\x80\x02}."), e]);
    let cases = [
        ("before torch 1.6", std::fs::read(data("torch/legacy.pt")).unwrap(), Unsupported, "convert it"),
        ("nothing", vec![], Format, "truncated"),
        ("zeros", vec![0; 100], Format, "zip"),
        ("half", good[..good.len() / 2].to_vec(), Format, "zip"),
        ("no pickle", archive(&[entry("x/data/0", b"1234")]), Format, "data.pkl"),
        ("two pickles", with("y/data.pkl"), Format, "several"),
        ("absolute", with("/etc/passwd"), Format, "relative"),
        ("parent", with("x/../../y"), Format, "relative"),
        ("backslash", with("x\\y"), Format, "relative"),
        ("name twice", archive(&[entry("x/data.pkl", b"."), entry("x/data.pkl", b".")]), Format, "twice"),
        ("byte order", with("x/byteorder"), Unsupported, "byteorder"),
        ("deflated", and(deflated), Unsupported, "torch.save"),
        ("size outside", and(outside), Format, "x/data/0"),
        ("place outside", and(beyond), Format, "x/data/0"),
        ("overlap", and(overlap), Format, "overlaps"),
    ];
    let mut table = Table::default();
    for (case, bytes, kind, part) in cases {
        table.fails(case, open(&bytes), kind, &[part, "x.bin"]);
    }
    table.fails("folder", TorchFile::open(&data("torch")), ErrorKind::Io, &["regular file"]);
    table.finish();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_mutation_of_a_file_panics(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
        let mut bytes = std::fs::read(data("torch/kinds.pt")).unwrap();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(file) = open(&bytes) {
            for name in file.names() {
                if let Ok(view) = file.tensor(name) {
                    view.all();
                }
            }
        }
    }
}
