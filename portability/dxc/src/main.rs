//! Compiles HLSL with DXC, as wgpu's DX12 back end would: `dxc LIBDXCOMPILER FILE...`. Every file is compiled for the
//! lowest shader model with wave operations, and for the one with half precision where it names it.

use std::process::ExitCode;

use hassle_rs::{Dxc, DxcCompiler, DxcLibrary};

/// What `wgpu_hal::dx12` gives DXC.
const ARGUMENTS: [&str; 3] = ["-HV", "2018", "-no-warnings"];

fn compile(compiler: &DxcCompiler, library: &DxcLibrary, path: &str) -> Result<usize, String> {
    let source = std::fs::read_to_string(path).map_err(|e| e.to_string())?;
    let blob = library.create_blob_with_encoding_from_str(&source).map_err(|e| e.to_string())?;
    let mut arguments = ARGUMENTS.to_vec();
    // naga writes f16 as `half`, and a variable of that name as `half_`.
    let halves = ["half ", "half(", "half2", "half3", "half4"].iter().any(|word| source.contains(word));
    if halves {
        arguments.push("-enable-16bit-types");
    }
    let model = if halves { "cs_6_2" } else { "cs_6_0" };
    match compiler.compile(&blob, path, "main", model, &arguments, None, &[]) {
        Ok(result) => Ok(result.get_result().map_err(|e| e.to_string())?.to_vec::<u8>().len()),
        Err((result, code)) => {
            let text = result.get_error_buffer().ok().and_then(|b| library.get_blob_as_string(&b.into()).ok());
            Err(text.unwrap_or_else(|| format!("{code:?}")))
        }
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [library, files @ ..] = &arguments[..] else {
        eprintln!("usage: dxc LIBDXCOMPILER FILE...");
        return ExitCode::from(2);
    };
    let dxc = Dxc::new(Some(library.into())).expect("a library that holds DXC");
    let (compiler, library) = (dxc.create_compiler().expect("a compiler"), dxc.create_library().expect("a library"));
    let (mut bytes, mut failed) = (0, 0);
    for file in files {
        match compile(&compiler, &library, file) {
            Ok(n) => bytes += n,
            Err(why) => {
                println!("{file}: {why}");
                failed += 1;
            }
        }
    }
    println!("{} of {} files compiled, {bytes} bytes of DXIL", files.len() - failed, files.len());
    ExitCode::from(u8::from(failed > 0))
}
