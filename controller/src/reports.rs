//! Which reports make sense: pure checks of what an agent sent, before anything is looked up.
//!
//! A report that fails is rejected with a [`Reason`], counted and acknowledged, so that the agent does not
//! send it for ever; the others of its batch are stored.

use flexcomm_domain::{Bandwidth, CodecBytes, Collective, Seconds, Strategy};
use flexcomm_wire::{
    JobSeen, LinkReport, MAX_ENERGY, MAX_STEPS, PathReport, ReportBody, ShapeReport, StepRecord, StepsReport,
    StrategyWire, ThroughputReport, TrialOutcome, TrialReport,
};

use crate::labels::labels;
use crate::limits::{MAX_INTEGER, MAX_LATENCY_S, MAX_MEASURED_S, MAX_TEXT, MAX_WORLD};

labels! {
    /// Why a report was rejected; the label of `flexcomm_rejected_reports_total`.
    pub enum Reason {
        /// Not a report of this protocol: a field is missing, of another type, or NaN (null in JSON).
        Malformed = "malformed",
        /// A number out of its range.
        BadValue = "bad-value",
        /// It names a node that never registered.
        UnknownNode = "unknown-node",
        /// It names a job that no trainer announced.
        UnknownJob = "unknown-job",
        /// The rank is not there, or it runs on another node.
        UnknownRank = "unknown-rank",
        /// The job is known with another size, and runs.
        JobConflict = "job-conflict",
        /// A decision that was never made.
        UnknownVersion = "unknown-version",
        /// A decision older than one that the rank already reported.
        OldVersion = "old-version",
        /// The digest is not the decision's.
        Digest = "digest",
        /// A trial that was never asked for.
        UnknownTrial = "unknown-trial",
        /// A limit is reached.
        Full = "full",
    }
}

/// A report that is not stored.
#[derive(Debug, Clone, PartialEq)]
pub struct Rejected {
    /// Of which kind.
    pub reason: Reason,
    /// What was wrong with which value.
    pub detail: String,
}

impl Rejected {
    /// With a detail in words.
    pub fn new(reason: Reason, detail: impl Into<String>) -> Self {
        Self { reason, detail: detail.into() }
    }
}

type Checked = Result<(), Rejected>;

fn bad(detail: String) -> Rejected {
    Rejected::new(Reason::BadValue, detail)
}

fn within(what: &str, value: f64, range: std::ops::RangeInclusive<f64>) -> Checked {
    if range.contains(&value) {
        Ok(())
    } else {
        Err(bad(format!("{what} is {value}, allowed is {} to {}", range.start(), range.end())))
    }
}

/// A measured time in microseconds.
fn duration(what: &str, us: f64) -> Checked {
    within(what, us, 0.0..=MAX_MEASURED_S * 1e6)
}

fn share(what: &str, value: f64) -> Checked {
    within(what, value, 0.0..=1.0)
}

fn bandwidth(what: &str, bps: f64) -> Checked {
    Bandwidth::new(bps).map(|_| ()).map_err(|e| bad(format!("{what}: {e}")))
}

fn integer(what: &str, value: u64) -> Checked {
    if value <= MAX_INTEGER { Ok(()) } else { Err(bad(format!("{what} is {value}, allowed is 0 to {MAX_INTEGER}"))) }
}

fn text(what: &str, value: &str) -> Checked {
    if value.chars().count() <= MAX_TEXT {
        Ok(())
    } else {
        Err(bad(format!("{what} has {} characters, allowed are {MAX_TEXT}", value.chars().count())))
    }
}

/// Checks every value of a report.
pub fn check(body: &ReportBody) -> Checked {
    match body {
        ReportBody::Link(r) => link(r),
        ReportBody::Throughput(r) => throughput(r),
        ReportBody::Path(r) => path(r),
        ReportBody::JobSeen(r) => job_seen(r),
        ReportBody::JobLeft { .. } => Ok(()),
        ReportBody::Steps(r) => steps(r),
        ReportBody::Applied(r) => integer("version", r.version).and_then(|()| integer("step", r.step)),
        ReportBody::Trial(r) => trial(r),
        ReportBody::Shape(r) => shape(r),
    }
}

fn link(r: &LinkReport) -> Checked {
    within("latency_us", r.latency_us, 0.0..=MAX_LATENCY_S * 1e6)?;
    duration("jitter_us", r.jitter_us)?;
    share("latency_confidence", r.latency_confidence)?;
    share("bandwidth_confidence", r.bandwidth_confidence)?;
    share("loss_out", r.loss_out)?;
    share("loss_back", r.loss_back)?;
    let year = Seconds::new(31_536_000.0).unwrap_or(Seconds::ZERO).get() * 1e3;
    within("latency_age_ms", r.latency_age_ms, 0.0..=year)?;
    within("bandwidth_age_ms", r.bandwidth_age_ms, 0.0..=year)?;
    r.bandwidth_bps.map_or(Ok(()), |bps| bandwidth("bandwidth_bps", bps))
}

fn throughput(r: &ThroughputReport) -> Checked {
    integer("grant", r.grant)?;
    integer("bytes", r.bytes)?;
    integer("out_bytes", r.out_bytes.unwrap_or_default())?;
    for (what, bps) in [("out_bps", r.out_bps), ("back_bps", r.back_bps)] {
        bps.map_or(Ok(()), |bps| bandwidth(what, bps))?;
    }
    text("error", r.error.as_deref().unwrap_or_default())
}

/// Most hops of a path: a TTL has eight bits.
const MAX_HOPS: usize = 255;

/// Compressors of a trainer: all that this release has, and as many that a script names.
const MAX_CODECS: usize = 64;

fn path(r: &PathReport) -> Checked {
    if r.hops.len() <= MAX_HOPS { Ok(()) } else { Err(bad(format!("{} hops, allowed are {MAX_HOPS}", r.hops.len()))) }
}

fn job_seen(r: &JobSeen) -> Checked {
    if r.world == 0 || r.world > MAX_WORLD {
        return Err(bad(format!("world is {}, allowed is 1 to {MAX_WORLD}", r.world)));
    }
    if r.rank >= r.world {
        return Err(bad(format!("rank is {}, the world has {}", r.rank, r.world)));
    }
    if r.gradient_values == 0 || r.gradient_values > MAX_INTEGER {
        return Err(bad(format!("gradient_values is {}, allowed is 1 to {MAX_INTEGER}", r.gradient_values)));
    }
    text("backend", &r.backend)?;
    if r.codecs.len() > MAX_CODECS || r.collectives.len() > 16 {
        return Err(bad(format!("more than {MAX_CODECS} codecs or 16 collectives")));
    }
    for codec in &r.codecs {
        text("compressor", &codec.compressor)?;
        integer("header_bytes", codec.header_bytes)?;
        CodecBytes::try_from(codec).and(codec.costs()).map_err(|e| bad(e.to_string()))?;
    }
    r.collectives.iter().try_for_each(|c| text("collective", c))?;
    // Names that are not known come from a newer trainer; without one that is known nothing could ever be decided.
    if r.collectives.iter().any(|c| Collective::ALL.iter().any(|known| known.as_str() == c)) {
        return Ok(());
    }
    let known = Collective::ALL.iter().map(|known| known.as_str()).collect::<Vec<_>>().join(", ");
    Err(bad(format!("no collective of job {} is known here; known are {known}", r.job)))
}

/// What ran, checked.
pub fn ran(report: &StepsReport) -> Result<Strategy, Rejected> {
    strategy(&report.strategy)
}

fn strategy(wire: &StrategyWire) -> Result<Strategy, Rejected> {
    Strategy::try_from(wire).map_err(|e| bad(e.to_string()))
}

fn steps(r: &StepsReport) -> Checked {
    ran(r)?;
    integer("version", r.version)?;
    if r.steps.is_empty() || r.steps.len() > MAX_STEPS {
        return Err(bad(format!("{} steps, allowed are 1 to {MAX_STEPS}", r.steps.len())));
    }
    if r.steps.windows(2).any(|w| w[0].step >= w[1].step) {
        return Err(bad("the steps do not ascend".to_owned()));
    }
    r.steps.iter().try_for_each(step)
}

/// Rounding of f32 sums may lift a gain this far above 1.
const GAIN_SLACK: f64 = 1e-3;

fn gain(value: f64) -> Checked {
    if value > 0.0 && value <= 1.0 + GAIN_SLACK {
        Ok(())
    } else {
        Err(bad(format!("gain is {value}, allowed is above 0, at most 1")))
    }
}

fn energy(what: &str, value: Option<f64>) -> Checked {
    match value {
        Some(value) if !(0.0..=MAX_ENERGY).contains(&value) => {
            Err(bad(format!("{what} is {value:e}, allowed is 0 to {MAX_ENERGY:e}")))
        }
        _ => Ok(()),
    }
}

fn step(s: &StepRecord) -> Checked {
    integer("step", s.step)?;
    integer("bytes_sent", s.bytes_sent)?;
    duration("compute_us", s.compute_us)?;
    duration("comp_us", s.comp_us)?;
    duration("sync_us", s.sync_us)?;
    s.wait_us.map_or(Ok(()), |wait| duration("wait_us", wait))?;
    duration("step_us", s.step_us)?;
    gain(s.gain)?;
    energy("energy", s.energy)?;
    s.accuracy.map_or(Ok(()), |a| share("accuracy", a))?;
    s.loss.map_or(Ok(()), |l| within("loss", l, -1e12..=1e12))
}

fn trial(r: &TrialReport) -> Checked {
    integer("id", r.id)?;
    duration("cost_us", r.cost_us)?;
    text("aborted", r.aborted.as_deref().unwrap_or_default())?;
    if r.outcomes.len() > flexcomm_wire::MAX_CANDIDATES {
        return Err(bad(format!("{} outcomes, allowed are {}", r.outcomes.len(), flexcomm_wire::MAX_CANDIDATES)));
    }
    r.outcomes.iter().try_for_each(outcome)
}

fn outcome(o: &TrialOutcome) -> Checked {
    strategy(&o.strategy)?;
    gain(o.gain)?;
    energy("energy", o.energy)?;
    o.shadow_gain.map_or(Ok(()), gain)?;
    energy("shadow_energy", o.shadow_energy)?;
    duration("comp_us", o.comp_us)?;
    duration("sync_us", o.sync_us)
}

fn shape(r: &ShapeReport) -> Checked {
    integer("id", r.id)?;
    text("error", r.error.as_deref().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexcomm_domain::{CodecCost, Family, JobId, NodeName};
    use flexcomm_wire::CodecInfo;
    use proptest::prelude::{Just, prop_assert, prop_oneof, proptest};

    fn link() -> LinkReport {
        LinkReport {
            peer: NodeName::new("b").unwrap(),
            latency_us: 100.0,
            latency_confidence: 0.9,
            latency_age_ms: 1.0,
            bandwidth_bps: Some(1e9),
            bandwidth_confidence: 0.9,
            bandwidth_age_ms: 1.0,
            jitter_us: 1.0,
            loss_out: 0.0,
            loss_back: 0.0,
        }
    }

    fn record() -> StepRecord {
        StepRecord {
            step: 1,
            compute_us: 1.0,
            comp_us: 1.0,
            sync_us: 1.0,
            wait_us: None,
            step_us: 3.0,
            bytes_sent: 1,
            gain: 1.0,
            energy: None,
            loss: None,
            accuracy: None,
        }
    }

    fn absurd() -> impl proptest::strategy::Strategy<Value = f64> {
        prop_oneof![Just(f64::NAN), Just(f64::INFINITY), Just(f64::NEG_INFINITY), -1e300..-1e-300f64, 1e16..1e300f64]
    }

    proptest! {
        #[test]
        fn absurd_numbers_never_pass(v in absurd(), field in 0usize..9) {
            let mut r = link();
            let fields = [&mut r.latency_us, &mut r.latency_confidence, &mut r.latency_age_ms,
                &mut r.bandwidth_confidence, &mut r.bandwidth_age_ms, &mut r.jitter_us, &mut r.loss_out,
                &mut r.loss_back, r.bandwidth_bps.as_mut().unwrap()];
            *fields.into_iter().nth(field).unwrap() = v;
            prop_assert!(check(&ReportBody::Link(r)).is_err());
        }

        #[test]
        fn absurd_steps_never_pass(v in absurd(), field in 0usize..7) {
            let mut s = record();
            s.loss = Some(0.1);
            s.accuracy = Some(0.1);
            let fields = [&mut s.compute_us, &mut s.comp_us, &mut s.sync_us, &mut s.step_us, &mut s.gain,
                s.loss.as_mut().unwrap(), s.accuracy.as_mut().unwrap()];
            *fields.into_iter().nth(field).unwrap() = v;
            let report = StepsReport { job: JobId::new("j").unwrap(), rank: 0, version: 0,
                strategy: Strategy::DENSE_RING.into(), steps: vec![s] };
            prop_assert!(check(&ReportBody::Steps(report)).is_err());
        }
    }

    #[test]
    fn no_gradient_has_the_energy_that_is_rejected() {
        let checked = |energy| {
            let steps = vec![StepRecord { energy: Some(energy), ..record() }];
            let strategy: StrategyWire = Strategy::DENSE_RING.into();
            let outcome = TrialOutcome {
                strategy: strategy.clone(),
                gain: 1.0,
                energy: None,
                shadow_gain: Some(1.0),
                shadow_energy: Some(energy),
                comp_us: 0.0,
                sync_us: 0.0,
                iterations: 0,
            };
            let job = JobId::new("j").unwrap();
            let trial = TrialReport {
                job: job.clone(),
                rank: 0,
                id: 1,
                outcomes: vec![TrialOutcome { energy: Some(energy), shadow_energy: None, ..outcome.clone() }],
                aborted: None,
                cost_us: 0.0,
            };
            let shadow = TrialReport { outcomes: vec![outcome], ..trial.clone() };
            let steps = StepsReport { job, rank: 0, version: 0, strategy, steps };
            [ReportBody::Steps(steps), ReportBody::Trial(trial), ReportBody::Trial(shadow)].map(|body| check(&body))
        };
        for good in [0.0, 1e-30, 1e40, MAX_ENERGY] {
            assert_eq!(checked(good), [const { Ok(()) }; 3]);
        }
        for (bad, as_written) in [(-1.0, "-1e0"), (f64::NAN, "NaN"), (f64::INFINITY, "inf"), (1e300, "1e300")] {
            let refused = checked(bad).map(|checked| checked.unwrap_err().detail);
            let expected = ["energy", "energy", "shadow_energy"];
            assert_eq!(refused, expected.map(|what| format!("{what} is {as_written}, allowed is 0 to 1e93")));
        }
    }

    #[test]
    fn good_reports_pass() {
        assert_eq!(check(&ReportBody::Link(link())), Ok(()));
        let mut report = StepsReport {
            job: JobId::new("j").unwrap(),
            rank: 0,
            version: 0,
            strategy: Strategy::DENSE_RING.into(),
            steps: vec![record()],
        };
        assert_eq!(check(&ReportBody::Steps(report.clone())), Ok(()));
        report.steps.push(record());
        assert!(check(&ReportBody::Steps(report.clone())).unwrap_err().detail.contains("ascend"));
        report.steps.clear();
        assert!(check(&ReportBody::Steps(report)).is_err());
    }

    fn seen(codecs: Vec<CodecInfo>, collectives: &[&str]) -> ReportBody {
        ReportBody::JobSeen(JobSeen {
            run: None,
            job: JobId::new("j").unwrap(),
            rank: 0,
            world: 2,
            gradient_values: 1000,
            backend: "gloo".into(),
            codecs,
            collectives: collectives.iter().map(|c| (*c).to_owned()).collect(),
        })
    }

    #[test]
    fn a_job_without_a_known_collective_is_rejected() {
        let seen = |collectives: &[&str]| seen(vec![], collectives);
        assert_eq!(check(&seen(&["dense-ring"])), Ok(()));
        assert_eq!(check(&seen(&["of-tomorrow", "allgather"])), Ok(()), "a newer trainer knows more");
        for none in [&[][..], &["of-tomorrow", "Dense-Ring"]] {
            let refused = check(&seen(none)).unwrap_err();
            assert_eq!(refused.reason, Reason::BadValue);
            assert!(refused.detail.contains("job j") && refused.detail.contains("dense-ring"), "{}", refused.detail);
        }
    }

    #[test]
    fn what_no_codec_takes_is_rejected() {
        let times = |value_s| Some([CodecCost { value_s, kept_s: 0.0 }; 2].into());
        let codec = |times| CodecInfo { times, ..CodecInfo::new(Family::NONE, CodecBytes::DENSE) };
        let seen = |times| seen(vec![codec(times)], &["allgather"]);
        assert_eq!(check(&seen(times(1e-9))), Ok(()));
        let refused = check(&seen(times(0.5))).unwrap_err();
        assert_eq!(refused, Rejected::new(Reason::BadValue, "codec's time per value is 0.5, allowed is 0 to 0.001 s"));
    }

    #[test]
    fn the_detail_names_value_and_range() {
        let report = LinkReport { loss_out: 1.5, ..link() };
        let refused = check(&ReportBody::Link(report)).unwrap_err();
        assert_eq!(refused, Rejected::new(Reason::BadValue, "loss_out is 1.5, allowed is 0 to 1"));
        let report = LinkReport { bandwidth_bps: Some(1.0), ..link() };
        assert!(check(&ReportBody::Link(report)).unwrap_err().detail.contains("1e3 to 1e14"));
    }
}
