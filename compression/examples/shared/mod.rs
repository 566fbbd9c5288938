//! What the examples share.

use flexcomm_compression::Kernel;

/// An argument as a number that is allowed, or its default.
pub fn read<T: std::str::FromStr>(
    name: &str,
    text: Option<String>,
    (default, allowed): (T, fn(&T) -> bool),
) -> Result<T, String> {
    let Some(text) = text else { return Ok(default) };
    let refused = || format!("failed to read {name} from {text:?}: it must be a number in range");
    text.parse().ok().filter(allowed).ok_or_else(refused)
}

/// The kernel that an argument names, or the fastest.
pub fn read_kernel(text: Option<String>) -> Result<Kernel, String> {
    let Some(text) = text else { return Ok(Kernel::best()) };
    let names: Vec<String> = Kernel::available().map(|kernel| format!("{kernel:?}").to_lowercase()).collect();
    let named = Kernel::available().zip(&names).find(|(_, name)| **name == text);
    let refused = || format!("failed to read kernel from {text:?}: this machine has {}", names.join(", "));
    named.map(|(kernel, _)| kernel).ok_or_else(refused)
}
