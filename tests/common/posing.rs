//! Devices that are not at hand: wgpu's `noop` back end poses as them. It checks commands against the limits and computes nothing.

use wgmoe::Gpu;
use wgmoe::plan::matrix;
use wgpu::{Adapter, Backends, DeviceType, ExperimentalFeatures, Features, Limits};

/// The adapter of a device with these features and limits, and subgroups of such sizes.
pub fn adapter(kind: DeviceType, features: Features, limits: Limits, subgroups: Option<(u32, u32)>) -> Adapter {
    let mut desc = wgpu::InstanceDescriptor::new_without_display_handle();
    desc.backends = Backends::NOOP;
    desc.backend_options.noop = wgpu::NoopBackendOptions {
        enable: true,
        limits: Some(limits),
        features: Some(features),
        device_type: Some(kind),
        subgroup_min_size: subgroups.map(|s| s.0),
        subgroup_max_size: subgroups.map(|s| s.1),
    };
    pollster::block_on(wgpu::Instance::new(desc).enumerate_adapters(Backends::NOOP)).remove(0)
}

/// Its device, with what `matrices` need: `noop` lists none, so nobody else asks for it.
pub fn open(adapter: &Adapter, matrices: bool) -> Gpu {
    let (mut required_features, required_limits, mut experimental_features) = Gpu::wanted(adapter);
    if matrices {
        required_features |= matrix::FEATURES;
        // SAFETY: nothing runs on this device.
        experimental_features = unsafe { ExperimentalFeatures::enabled() };
    }
    let desc =
        wgpu::DeviceDescriptor { required_features, required_limits, experimental_features, ..Default::default() };
    let (device, queue) = pollster::block_on(adapter.request_device(&desc)).unwrap();
    Gpu::from_wgpu(adapter, device, queue, None).unwrap()
}
