//! Links that change again and again: the estimate follows, whatever measures them.

use super::*;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// What measures the link.
#[derive(Debug, Clone, Copy)]
enum Source {
    Tests,
    Transfers {
        bytes: f64,
    },
    Streams,
    /// A test after every so many transfers.
    Both {
        every: usize,
    },
}

fn source() -> impl Strategy<Value = Source> {
    prop_oneof![
        Just(Source::Tests),
        (6.0..7.5f64).prop_map(|b| Source::Transfers { bytes: 10f64.powf(b) }),
        Just(Source::Streams),
        (2..8usize).prop_map(|every| Source::Both { every }),
    ]
}

/// For how many samples the link stays, and how far it jumps then, away from what is usual or back to it.
fn flap() -> impl Strategy<Value = (usize, f64)> {
    (BEFORE..40usize, (1.6f64.ln()..30f64.ln()).prop_map(f64::exp))
}

/// Samples after which the estimate is right.
const SAMPLES: usize = 6;
/// Changes are at least so many samples apart.
const BEFORE: usize = 7;

struct Link {
    estimator: LinkEstimator,
    rng: SmallRng,
    now_s: f64,
    samples: usize,
}

impl Link {
    fn now(&self) -> Timestamp {
        Timestamp((self.now_s * 1e6) as u64)
    }

    /// One sample of a link of `bps`, `apart` seconds after the last.
    fn sample(&mut self, source: Source, bps: f64, apart: f64) {
        self.now_s += apart;
        self.samples += 1;
        let (now, off) = (self.now(), self.rng.random_range(0.97..1.03));
        self.estimator.echo(now, 0.002).unwrap();
        let transfer = |bytes: f64| (bytes, 0.001 + bytes * 8.0 / (bps * off));
        match source {
            Source::Tests => self.estimator.throughput(now, bps * off).unwrap(),
            Source::Both { every } if self.samples.is_multiple_of(every) => {
                self.estimator.throughput(now, bps * off).unwrap();
            }
            Source::Transfers { bytes } => {
                let (bytes, seconds) = transfer(bytes);
                self.estimator.transfer(now, bytes, seconds).unwrap();
            }
            Source::Streams | Source::Both { .. } => {
                self.estimator.transfer_rounds(now, 0.1 * bps * off / 8.0, 0.1, 0.0).unwrap();
            }
        }
    }

    fn bps(&self) -> f64 {
        self.estimator.estimate(self.now()).bandwidth.unwrap().get()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { rng_seed: RngSeed::Fixed(1), ..ProptestConfig::default() })]

    #[test]
    fn a_link_that_flaps_is_followed(
        seed: u64, source in source(), mbit in 30.0..100.0f64, apart in 0.2..10.0f64,
        flaps in prop::collection::vec(flap(), 2..20), rises in any::<bool>(),
    ) {
        let estimator = LinkEstimator::new(EstimatorConfig::default());
        let mut link = Link { estimator, rng: SmallRng::seed_from_u64(seed), now_s: 1.0, samples: 0 };
        let (usual, mut bps) = (mbit * 1e6, mbit * 1e6);
        for (samples, factor) in flaps {
            for i in 1..=samples {
                link.sample(source, bps, apart);
                let found = link.bps();
                prop_assert!(
                    i < SAMPLES || (found / bps - 1.0).abs() < 0.1,
                    "{found} of {bps} at {} s, {i} samples after the change", link.now_s
                );
            }
            bps = if bps != usual { usual } else if rises { usual * factor } else { usual / factor };
        }
    }
}
