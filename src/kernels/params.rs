//! The one macro of the crate: a host struct whose layout the tests compare with the WGSL struct of the same name.

/// A parameter block: its WGSL name and where each field lies.
pub trait Params: bytemuck::Pod {
    /// Name of the WGSL struct.
    const NAME: &'static str;
    /// Fields with their byte offsets, in order.
    const FIELDS: &'static [(&'static str, usize)];
}

macro_rules! params {
    ($(#[$meta:meta])* $name:ident { $($(#[$fmeta:meta])* $field:ident : $ty:ty),* $(,)? }) => {
        $(#[$meta])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
        pub struct $name { $($(#[$fmeta])* pub $field: $ty),* }
        impl $crate::kernels::params::Params for $name {
            const NAME: &'static str = stringify!($name);
            const FIELDS: &'static [(&'static str, usize)] = &[$((stringify!($field), std::mem::offset_of!($name, $field))),*];
        }
    };
}
pub(crate) use params;
