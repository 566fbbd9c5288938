//! The CUDA C++ files, part of the binary.

/// A file that becomes one module on the device, with what it includes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Module {
    /// Its file's name.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
    /// Every kernel that it has.
    pub kernels: &'static [&'static str],
}

macro_rules! file {
    ($name:literal) => {
        include_str!(concat!("../cuda/", $name))
    };
}

/// Name and text of what modules include.
pub const HEADERS: &[(&str, &str)] = &[
    ("common.cuh", file!("common.cuh")),
    ("block.cuh", file!("block.cuh")),
    ("state.cuh", file!("state.cuh")),
    ("feedback.cuh", file!("feedback.cuh")),
    ("codes.cuh", file!("codes.cuh")),
    ("rules.cuh", file!("rules.cuh")),
];

/// A line for each file of `cuda/`, and the kernels in it.
macro_rules! modules {
    ($($file:literal: $($kernel:ident)+;)+) => {
        /// Every module.
        pub const MODULES: &[Module] =
            &[$(Module { name: $file, text: file!($file), kernels: &[$(stringify!($kernel)),+] }),+];
    };
}

modules! {
    // Error feedback, exact cuts, compaction and packing of what is selected.
    "select.cu": cut_second cut_third take gaps clear pack compensate_f32 compensate_f16 compensate_bf16;
    // Gains of all candidate ratios in one read, and what one read takes.
    "gains.cu": gains_f32 gains_f16 gains_bf16 largest_f32;
    // Quantizers and their inverses, and the majority vote.
    "quantize.cu": norms signs signs_f32 signs_f16 signs_bf16 signs_undo add_signs majority natural add_natural
        eightbit add_eightbit cast_f16 cast_bf16 add_f16 add_bf16 stats_f32 stats_f16 stats_bf16 quantize_linear
        quantize_powers quantize_draw quantize_grid dequantize_linear dequantize_powers dequantize_draw
        dequantize_grid;
    // Thresholds of MSTopk, DGC and SIDCo.
    "threshold.cu": settle_at bisect count_band sample reach fit_stage;
    // Gather and scatter, sets of indices at random, and payloads of values at indices.
    "indices.cu": gather keep put scatter add_mean mark draw_first draw_set count_set scan_set list_set add_listed
        count_marks scan_marks add_marked;
    // PowerSGD between its products.
    "lowrank.cu": power_right power_send power_left power_add power_any power_warm;
    // Marsit's operator.
    "marsit.cu": marsit;
    // 1-bit SGD, min-max 8-bit, INCEPTIONN.
    "ranges.cu": side_columns sides add_sides minmax add_minmax count_sizes scan_sizes put_sizes add_sizes;
    // Strom's hard threshold and Qsparse, after a selection.
    "hybrids.cu": list_norm list_levels list_signs;
    // 3LC.
    "threelc.cu": quartic scan_last count_runs scan_runs put_runs count_codes add_runs;
}

/// Options that both NVRTC and the cache's key take. No contraction to fused multiply-add: the CPU side rounds every
/// product, and payloads must be the same bits.
pub const OPTIONS: &[&str] = &["--std=c++17", "--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false"];

/// What a module and its headers are, in one number: part of the cache's key.
pub fn digest(module: &Module) -> String {
    let mut hash = blake3::Hasher::new();
    let headers = HEADERS.iter().flat_map(|(name, text)| [*name, *text]);
    for part in [module.name, module.text].into_iter().chain(headers).chain(OPTIONS.iter().copied()) {
        hash.update(&(part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    hash.finalize().to_hex()[..32].to_owned()
}
