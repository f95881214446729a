//! The folder that translated shaders are left in for other compilers.

use std::fmt::Write as _;
use std::path::PathBuf;

use wgmoe::Tier;
use wgmoe::kernels::linker::label;
use wgmoe::kernels::variants::Variant;

pub struct Folder {
    path: PathBuf,
    /// Labels in the order of `variants.tsv`; a file is named by its place.
    labels: Vec<String>,
}

impl Folder {
    /// `WGMOE_SHADERS`, with `variants.tsv`: number, stem, tiers, label.
    pub fn from_env(variants: &[Variant]) -> Option<Self> {
        let path = PathBuf::from(std::env::var_os("WGMOE_SHADERS")?);
        std::fs::create_dir_all(&path).unwrap();
        let labels: Vec<String> = variants.iter().map(|v| label(v.kernel, &v.vars)).collect();
        let mut table = String::new();
        for (i, (variant, label)) in variants.iter().zip(&labels).enumerate() {
            let tiers: Vec<String> = variant.tiers.iter().map(Tier::to_string).collect();
            writeln!(table, "{i:04}\t{}\t{}\t{label}", variant.kernel.stem, tiers.join(",")).unwrap();
        }
        std::fs::write(path.join("variants.tsv"), table).unwrap();
        Some(Self { path, labels })
    }

    fn number(&self, variant: &Variant) -> usize {
        let label = label(variant.kernel, &variant.vars);
        self.labels.iter().position(|l| *l == label).unwrap()
    }

    pub fn write(&self, variant: &Variant, ending: &str, checked: bool, bytes: &[u8]) {
        let folder = self.path.join(ending);
        std::fs::create_dir_all(&folder).unwrap();
        let checks = if checked { "checked" } else { "unchecked" };
        std::fs::write(folder.join(format!("{:04}.{checks}.{ending}", self.number(variant))), bytes).unwrap();
    }

    /// With the `enable` line that WebGPU wants and naga refuses; not the shaders that WebGPU cannot express.
    pub fn write_wgsl(&self, variant: &Variant, source: &str) {
        if variant.tiers[0] >= Tier::Matrix {
            return;
        }
        let enable = if variant.tiers[0] >= Tier::Subgroup { "enable subgroups;\n" } else { "" };
        let folder = self.path.join("wgsl");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join(format!("{:04}.wgsl", self.number(variant))), format!("{enable}{source}")).unwrap();
    }
}
