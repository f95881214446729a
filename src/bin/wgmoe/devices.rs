//! `wgmoe devices`: what can be run on.

use std::io::Write;

use anyhow::bail;
use clap::Args;
use wgmoe::gpu::{Gpu, GpuInfo};

use crate::table::{bytes, table};
use crate::{Device, Format};

/// List the GPUs with their drivers, the tiers they can run and the limits that matter
#[derive(Args)]
#[command(mut_arg("tuning", |arg| arg.hide(true)), after_help = "\
`--device` and `--tier` show only the devices that they would accept.

Examples:
  wgmoe devices
  wgmoe devices --format json | jq -r '.[].name'")]
pub struct Options {
    #[command(flatten)]
    device: Device,
    /// A table, or one JSON array
    #[arg(long, value_enum, default_value_t = Format::Table, value_name = "FORMAT")]
    format: Format,
}

pub fn run(options: &Options) -> anyhow::Result<()> {
    if options.device.tuning.is_some() {
        return Err(crate::usage("--tuning: nothing is run here"));
    }
    let tier = options.device.tier();
    let all = Gpu::list();
    if !all.is_empty() {
        options.device.named(&all)?;
    }
    let wanted = options.device.device.as_ref();
    let named = all.iter().filter(|info| wanted.is_none_or(|wanted| info.matches(wanted, all.len())));
    let shown: Vec<&GpuInfo> =
        named.clone().filter(|info| tier.is_none_or(|tier| info.tiers.contains(&tier))).collect();
    let mut out = std::io::stdout().lock();
    match options.format {
        Format::Json => writeln!(out, "{}", serde_json::to_string_pretty(&shown)?)?,
        Format::Table if shown.is_empty() => {}
        Format::Table => writeln!(out, "{}", listing(&shown))?,
    }
    match (all.is_empty(), shown.is_empty(), tier) {
        (true, ..) => bail!(
            "no GPU found; on Debian `apt-get install libvulkan1 mesa-vulkan-drivers` brings the Vulkan loader and a software device"
        ),
        (_, true, Some(tier)) => {
            let offers = named.map(|info| format!("`{}` offers {}", info.name, tiers(info, ", ")));
            bail!("--tier {tier}: {}", offers.collect::<Vec<_>>().join("; "))
        }
        _ => Ok(()),
    }
}

/// The driver with its version, as far as the system tells.
pub fn driver(info: &GpuInfo) -> String {
    format!("{} {}", info.driver, info.driver_info).trim().to_owned()
}

/// The tiers of a device, lowest first.
pub fn tiers(info: &GpuInfo, between: &str) -> String {
    info.tiers.iter().map(ToString::to_string).collect::<Vec<_>>().join(between)
}

fn listing(devices: &[&GpuInfo]) -> comfy_table::Table {
    let mut table = table(["#", "name", "backend", "type", "driver", "tiers", "limits"]);
    for info in devices {
        let limits = format!(
            "binding {}, buffer {}\nworkgroup {}, {} invocations\n{} storage buffers, subgroups {}-{}{}",
            bytes(info.max_binding_bytes),
            bytes(info.max_buffer_bytes),
            bytes(info.max_workgroup_bytes.into()),
            info.max_invocations,
            info.max_storage_buffers,
            info.subgroup_sizes.0,
            info.subgroup_sizes.1,
            if info.shader_f16 { ", f16" } else { "" },
        );
        let kind = if info.software { format!("{} (software)", info.device_type) } else { info.device_type.clone() };
        let row = [
            info.index.to_string(),
            info.name.clone(),
            info.backend.clone(),
            kind,
            driver(info),
            tiers(info, " "),
            limits,
        ];
        table.add_row(row);
    }
    table
}
