//! What a trainer computes on.

use flexcomm_wire::MAX_NAME;

/// The processor's model, as Linux names it, or the numbers that it has for it; none where it has neither.
pub fn processor() -> Option<String> {
    name(&model(&std::fs::read_to_string("/proc/cpuinfo").ok()?)?)
}

/// A name as it may be sent: without spaces around it, and cut where it is too long. None of nothing.
pub fn name(text: &str) -> Option<String> {
    let mut cut = String::new();
    for c in text.split_whitespace().collect::<Vec<_>>().join(" ").chars() {
        if cut.len() + c.len_utf8() > MAX_NAME {
            break;
        }
        cut.push(c);
    }
    (!cut.is_empty()).then_some(cut)
}

fn model(cpuinfo: &str) -> Option<String> {
    let of = |key: &str| {
        let mut lines = cpuinfo.lines().filter_map(|line| line.split_once(':'));
        lines.find(|(name, _)| name.trim() == key).map(|(_, value)| value.trim())
    };
    // Servers with ARM's processors have no name.
    let arm = || Some(format!("ARM {} {}", of("CPU implementer")?, of("CPU part")?));
    of("model name").map(str::to_owned).or_else(arm)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_is_named_as_linux_does() {
        let x86 = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel\t\t: 1\nmodel name\t: AMD EPYC 7B13\n";
        assert_eq!(model(x86).as_deref(), Some("AMD EPYC 7B13"));
        let arm = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n";
        assert_eq!(model(arm).as_deref(), Some("ARM 0x41 0xd40"));
        assert_eq!(model("processor\t: 0\nBogoMIPS\t: 50.00\n"), None);
        assert_eq!(name("  "), None);
        let long = name(&"é".repeat(60)).unwrap();
        assert_eq!(long.len(), 62, "whole characters");
    }
}
