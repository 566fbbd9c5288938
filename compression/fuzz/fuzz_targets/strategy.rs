#![no_main]
use flexcomm_domain::spec::CompressorSpec;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(strategy) = text.parse::<CompressorSpec>() {
        let canonical = strategy.to_string();
        let again: CompressorSpec = canonical.parse().expect("the canonical form");
        assert_eq!(again.to_string(), canonical);
        let numbers = strategy.values().all();
        let codec = CompressorSpec::from_numbers(strategy.compressor(), numbers).expect("its own numbers");
        assert_eq!(codec.values(), strategy.values());
    }
    let map = text.lines().filter_map(|line| line.split_once('='));
    if let Ok(strategy) = CompressorSpec::from_byteps(map) {
        assert_eq!(strategy.to_string().parse::<CompressorSpec>().expect("the canonical form"), strategy);
    }
});
