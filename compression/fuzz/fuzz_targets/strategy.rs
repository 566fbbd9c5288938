#![no_main]
use flexcomm_compression::strategy::Strategy;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(strategy) = text.parse::<Strategy>() {
        let canonical = strategy.to_string();
        let again: Strategy = canonical.parse().expect("the canonical form");
        assert_eq!(again.to_string(), canonical);
        let numbers = strategy.values().all();
        let codec = Strategy::from_numbers(strategy.entry(), numbers).expect("its own numbers");
        assert_eq!(codec.values(), strategy.values());
    }
    let map = text.lines().filter_map(|line| line.split_once('='));
    if let Ok(strategy) = Strategy::from_byteps(map) {
        assert_eq!(strategy.to_string().parse::<Strategy>().expect("the canonical form"), strategy);
    }
});
