//! Which reports can be believed: checked by the agent, which takes them from trainers, and by the controller, which
//! takes them from agents, before anything is looked up.

use flexcomm_domain::{Bandwidth, CodecBytes, Collective, Invalid, Plan, Strategy};
use std::ops::RangeInclusive;

use crate::{
    AppliedReport, Heartbeat, Hello, HostSeen, LinkReport, MAX_CANDIDATES, MAX_ENERGY, MAX_HOSTS, MAX_INTEGER,
    MAX_LOSS, MAX_STEPS, MAX_TEXT, PathReport, ReportBody, ShapeReport, StepRecord, StepsReport, StrategyWire,
    ThroughputReport, TrialOutcome, TrialReport,
};

/// Most ranks of a job: what a link matrix may span.
const MAX_WORLD: u32 = 4096;
/// Most codecs and most collectives of a trainer: all that this release has, and as many that a script names.
const MAX_NAMES: usize = 64;
/// Most buckets of a gradient: at DDP's 25 MB each, 100 GB.
const MAX_BUCKETS: usize = 4096;
/// Longest name of a backend, codec or collective, in bytes.
pub const MAX_NAME: usize = 63;
/// Longest policy as JSON, in bytes: all kinds of compressors, and the longest plan.
const MAX_POLICY: usize = 8192;
/// Longest believable part of a step in µs: an hour.
const MAX_PART_US: f64 = 3.6e9;
/// Longest believable trial in µs: a day.
const MAX_TRIAL_US: f64 = 24.0 * MAX_PART_US;
/// Longest one-way latency that is believed, in µs: ten times what a path over a geostationary satellite takes.
const MAX_LATENCY_US: f64 = 3e6;
/// Highest age of a sample in ms: a year.
const MAX_AGE_MS: f64 = 31_536_000e3;
/// Rounding of f32 sums may lift a gain this far above 1; the controller takes it as 1.
const GAIN_SLACK: f64 = 1e-3;
/// Most hops of a path: a TTL has eight bits.
const MAX_HOPS: usize = 255;

/// What was wrong with which value of a report.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadValue(pub String);

impl From<Invalid> for BadValue {
    fn from(invalid: Invalid) -> Self {
        Self(invalid.to_string())
    }
}

type Checked = Result<(), BadValue>;

fn bad<T>(detail: String) -> Result<T, BadValue> {
    Err(BadValue(detail))
}

fn within(what: &str, value: f64, range: RangeInclusive<f64>) -> Checked {
    if range.contains(&value) {
        return Ok(());
    }
    bad(format!("{what} is {value}, allowed is {} to {}", range.start(), range.end()))
}

/// A measured time in microseconds.
fn duration(what: &str, us: f64) -> Checked {
    within(what, us, 0.0..=MAX_PART_US)
}

fn share(what: &str, value: f64) -> Checked {
    within(what, value, 0.0..=1.0)
}

fn integer(what: &str, value: u64) -> Checked {
    if value <= MAX_INTEGER { Ok(()) } else { bad(format!("{what} is {value}, allowed is 0 to 2^53")) }
}

fn text(what: &str, value: Option<&str>) -> Checked {
    match value.unwrap_or_default().chars().count() {
        0..=MAX_TEXT => Ok(()),
        length => bad(format!("{what} has {length} characters, allowed are {MAX_TEXT}")),
    }
}

fn strategy(wire: &StrategyWire) -> Checked {
    Strategy::try_from(wire)?;
    Ok(())
}

fn plan(wire: &StrategyWire) -> Checked {
    Plan::try_from(wire)?;
    Ok(())
}

fn gain(value: f64) -> Checked {
    if value > 0.0 && value <= 1.0 + GAIN_SLACK {
        return Ok(());
    }
    bad(format!("gain is {value}, allowed is above 0, at most 1"))
}

fn energy(what: &str, value: Option<f64>) -> Checked {
    match value {
        Some(value) if !(0.0..=MAX_ENERGY).contains(&value) => {
            bad(format!("{what} is {value:e}, allowed is 0 to {MAX_ENERGY:e}"))
        }
        _ => Ok(()),
    }
}

impl Heartbeat {
    /// Checks what it tells of hosts.
    pub fn check(&self) -> Result<(), BadValue> {
        if self.hosts.len() > MAX_HOSTS {
            return bad(format!("{} hosts, at most {MAX_HOSTS}", self.hosts.len()));
        }
        let host = |host: &HostSeen| {
            text("host", Some(&host.host))?;
            duration("round_trip_us", host.round_trip_us.unwrap_or_default())?;
            share("loss", host.loss.unwrap_or_default())
        };
        self.hosts.iter().try_for_each(host)
    }
}

impl ReportBody {
    /// Checks every value.
    pub fn check(&self) -> Result<(), BadValue> {
        match self {
            Self::Link(r) => link(r),
            Self::Throughput(r) => throughput(r),
            Self::Path(r) => path(r),
            Self::JobSeen(r) => r.check(),
            Self::JobLeft { .. } => Ok(()),
            Self::Steps(r) => steps(r),
            Self::Applied(r) => applied(r),
            Self::Trial(r) => trial(r),
            Self::Shape(r) => shape(r),
        }
    }
}

impl Hello {
    /// Checks every value.
    pub fn check(&self) -> Result<(), BadValue> {
        let Self { rank, world, gradient_values, buckets, momentum, policy, machine, codecs, collectives, .. } = self;
        if !(1..=MAX_WORLD).contains(world) || rank >= world {
            return bad(format!("rank {rank} of {world}: allowed are 1 to {MAX_WORLD} ranks, numbered from 0"));
        }
        if !(1..=MAX_INTEGER).contains(gradient_values) {
            return bad(format!("gradient_values is {gradient_values}, allowed is 1 to 2^53"));
        }
        check_buckets(buckets, *gradient_values)?;
        if let Some(momentum) = momentum.filter(|momentum| !(0.0..1.0).contains(momentum)) {
            return bad(format!("momentum is {momentum}, allowed is 0 to below 1"));
        }
        if let Some(length) =
            policy.as_ref().map(|policy| policy.to_string().len()).filter(|length| *length > MAX_POLICY)
        {
            return bad(format!("a policy of {length} bytes, allowed are {MAX_POLICY}"));
        }
        if codecs.len() > MAX_NAMES || collectives.len() > MAX_NAMES {
            return bad(format!(
                "{} codecs and {} collectives, at most {MAX_NAMES} each",
                codecs.len(),
                collectives.len()
            ));
        }
        let names = codecs.iter().map(|c| &c.compressor).chain(collectives).chain([&self.backend]).chain(machine);
        if let Some(name) = names.into_iter().find(|name| !(1..=MAX_NAME).contains(&name.len())) {
            let shown: String = name.chars().take(80).collect();
            return bad(format!("the name {shown:?}: 1 to {MAX_NAME} bytes are allowed"));
        }
        for codec in codecs {
            let read = CodecBytes::try_from(codec).and(codec.costs()).map_err(BadValue::from);
            read.and_then(|_| integer("header_bytes", codec.header_bytes))
                .map_err(|BadValue(why)| BadValue(format!("codec {}: {why}", codec.compressor)))?;
        }
        // Names that are not known come from a newer trainer; without one that is known nothing could ever be decided.
        if collectives.iter().any(|name| Collective::ALL.iter().any(|known| known.as_str() == name)) {
            return Ok(());
        }
        let known: Vec<&str> = Collective::ALL.iter().map(|known| known.as_str()).collect();
        bad(format!("no collective of job {} is known here; known are {}", self.job, known.join(", ")))
    }
}

/// Checks the values of the buckets in which a gradient of so many values is sent; none: it is fused.
pub fn check_buckets(buckets: &[u64], gradient_values: u64) -> Result<(), BadValue> {
    if buckets.len() > MAX_BUCKETS {
        return bad(format!("{} buckets, at most {MAX_BUCKETS}", buckets.len()));
    }
    if let Some(empty) = buckets.iter().position(|values| *values == 0) {
        return bad(format!("bucket {empty} has 0 values, allowed is 1 or more"));
    }
    let values = buckets.iter().fold(0u64, |sum, values| sum.saturating_add(*values));
    if buckets.is_empty() || values == gradient_values {
        return Ok(());
    }
    bad(format!("the buckets have {values} values, and gradient_values is {gradient_values}: they must be the same"))
}

fn link(r: &LinkReport) -> Checked {
    within("latency_us", r.latency_us, 0.0..=MAX_LATENCY_US)?;
    duration("jitter_us", r.jitter_us)?;
    share("latency_confidence", r.latency_confidence)?;
    share("loss_out", r.loss_out)?;
    share("loss_back", r.loss_back)?;
    within("latency_age_ms", r.latency_age_ms, 0.0..=MAX_AGE_MS)
}

fn bandwidth(what: &str, bps: Option<f64>) -> Checked {
    match bps.map(Bandwidth::new) {
        Some(Err(why)) => bad(format!("{what}: {why}")),
        _ => Ok(()),
    }
}

fn throughput(r: &ThroughputReport) -> Checked {
    integer("grant", r.grant)?;
    integer("bytes", r.bytes)?;
    integer("out_bytes", r.out_bytes.unwrap_or_default())?;
    bandwidth("out_bps", r.out_bps)?;
    bandwidth("back_bps", r.back_bps)?;
    duration("took_us", r.took_us.unwrap_or_default())?;
    duration("cpu_us", r.cpu_us.unwrap_or_default())?;
    text("error", r.error.as_deref())
}

fn path(r: &PathReport) -> Checked {
    if r.hops.len() <= MAX_HOPS { Ok(()) } else { bad(format!("{} hops, allowed are {MAX_HOPS}", r.hops.len())) }
}

fn steps(r: &StepsReport) -> Checked {
    plan(&r.strategy)?;
    integer("version", r.version)?;
    if r.steps.is_empty() || r.steps.len() > MAX_STEPS {
        return bad(format!("{} steps in one report, allowed are 1 to {MAX_STEPS}", r.steps.len()));
    }
    if !r.steps.is_sorted_by(|a, b| a.step < b.step) {
        return bad("the steps of a report do not ascend".to_owned());
    }
    let of = |step: &StepRecord, BadValue(why)| BadValue(format!("step {}: {why}", step.step));
    r.steps.iter().try_for_each(|record| step(record).map_err(|why| of(record, why)))
}

fn step(s: &StepRecord) -> Checked {
    integer("its number", s.step)?;
    integer("bytes_sent", s.bytes_sent)?;
    duration("compute_us", s.compute_us)?;
    duration("comp_us", s.comp_us)?;
    duration("sync_us", s.sync_us)?;
    duration("wait_us", s.wait_us.unwrap_or_default())?;
    duration("step_us", s.step_us)?;
    gain(s.gain)?;
    energy("energy", s.energy)?;
    if s.bucket_energies.len() > MAX_BUCKETS {
        return bad(format!("{} bucket_energies, at most {MAX_BUCKETS}", s.bucket_energies.len()));
    }
    s.bucket_energies.iter().try_for_each(|of| energy("bucket_energies", Some(*of)))?;
    share("accuracy", s.accuracy.unwrap_or_default())?;
    within("loss", s.loss.unwrap_or_default(), -MAX_LOSS..=MAX_LOSS)
}

fn applied(r: &AppliedReport) -> Checked {
    integer("version", r.version)?;
    integer("step", r.step)?;
    integer("digest", r.digest)
}

fn trial(r: &TrialReport) -> Checked {
    integer("id", r.id)?;
    within("cost_us", r.cost_us, 0.0..=MAX_TRIAL_US)?;
    within("shadow_us", r.shadow_us.unwrap_or_default(), 0.0..=MAX_TRIAL_US)?;
    integer("bytes", r.bytes.unwrap_or_default())?;
    // Of all processors of a node.
    within("cpu_us", r.cpu_us.unwrap_or_default(), 0.0..=1024.0 * MAX_TRIAL_US)?;
    text("aborted", r.aborted.as_deref())?;
    if r.outcomes.len() > MAX_CANDIDATES {
        return bad(format!("{} outcomes of a trial, at most {MAX_CANDIDATES}", r.outcomes.len()));
    }
    let of = |outcome: &TrialOutcome, BadValue(why)| BadValue(format!("outcome of {}: {why}", outcome.strategy.0));
    r.outcomes.iter().try_for_each(|o| strategy(&o.strategy).and(outcome(o).map_err(|why| of(o, why))))
}

fn outcome(o: &TrialOutcome) -> Checked {
    gain(o.gain)?;
    energy("energy", o.energy)?;
    o.shadow_gain.map_or(Ok(()), gain)?;
    energy("shadow_energy", o.shadow_energy)?;
    duration("comp_us", o.comp_us)?;
    duration("sync_us", o.sync_us)
}

fn shape(r: &ShapeReport) -> Checked {
    integer("id", r.id)?;
    text("error", r.error.as_deref())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CodecInfo;
    use flexcomm_domain::{CodecCost, Family, JobId, NodeName};
    use proptest::prelude::{Just, prop_assert, prop_oneof, proptest};

    fn link() -> LinkReport {
        LinkReport {
            peer: NodeName::new("b").unwrap(),
            latency_us: 100.0,
            latency_confidence: 0.9,
            latency_age_ms: 1.0,
            jitter_us: 1.0,
            loss_out: 0.0,
            loss_back: 0.0,
            by_icmp: false,
        }
    }

    fn record() -> StepRecord {
        StepRecord {
            step: 1,
            compute_us: 1.0,
            comp_us: 1.0,
            sync_us: 1.0,
            step_us: 3.0,
            bytes_sent: 1,
            gain: 1.0,
            ..StepRecord::default()
        }
    }

    fn steps(steps: Vec<StepRecord>) -> ReportBody {
        let (job, strategy) = (JobId::new("j").unwrap(), Strategy::DENSE_RING.into());
        ReportBody::Steps(StepsReport { job, rank: 0, version: 0, strategy, steps })
    }

    fn absurd() -> impl proptest::strategy::Strategy<Value = f64> {
        prop_oneof![Just(f64::NAN), Just(f64::INFINITY), Just(f64::NEG_INFINITY), -1e300..-1e-300f64, 1e16..1e300f64]
    }

    proptest! {
        #[test]
        fn absurd_numbers_never_pass(v in absurd(), field in 0usize..6) {
            let mut r = link();
            let fields = [&mut r.latency_us, &mut r.latency_confidence, &mut r.latency_age_ms,
                &mut r.jitter_us, &mut r.loss_out, &mut r.loss_back];
            *fields.into_iter().nth(field).unwrap() = v;
            prop_assert!(ReportBody::Link(r).check().is_err());
        }

        #[test]
        fn absurd_steps_never_pass(v in absurd(), field in 0usize..8) {
            let mut s = record();
            (s.loss, s.accuracy, s.wait_us) = (Some(0.1), Some(0.1), Some(0.1));
            let fields = [&mut s.compute_us, &mut s.comp_us, &mut s.sync_us, &mut s.step_us, &mut s.gain,
                s.loss.as_mut().unwrap(), s.accuracy.as_mut().unwrap(), s.wait_us.as_mut().unwrap()];
            *fields.into_iter().nth(field).unwrap() = v;
            prop_assert!(steps(vec![s]).check().is_err());
        }
    }

    #[test]
    fn good_reports_pass() {
        assert_eq!(ReportBody::Link(link()).check(), Ok(()));
        assert_eq!(steps(vec![record()]).check(), Ok(()));
        assert!(steps(vec![record(), record()]).check().unwrap_err().0.contains("ascend"));
        assert!(steps(vec![]).check().is_err());
    }

    fn job_seen(codecs: Vec<CodecInfo>, collectives: &[&str]) -> Hello {
        let collectives = collectives.iter().map(|c| (*c).to_owned()).collect();
        Hello { codecs, collectives, ..Hello::new(JobId::new("j").unwrap(), (0, 2), 1000, "gloo") }
    }

    fn seen(codecs: Vec<CodecInfo>, collectives: &[&str]) -> Checked {
        job_seen(codecs, collectives).check()
    }

    #[test]
    fn a_momentum_that_no_optimizer_has_is_rejected() {
        let with = |momentum| Hello { momentum: Some(momentum), ..job_seen(vec![], &["dense-ring"]) }.check();
        assert_eq!((with(0.0), with(0.999)), (Ok(()), Ok(())));
        for bad in [1.0, -0.1, f64::NAN, f64::INFINITY] {
            assert!(with(bad).unwrap_err().0.contains("momentum"), "{bad}");
        }
    }

    #[test]
    fn a_policy_has_a_limit_and_is_otherwise_the_controllers_to_judge() {
        let with =
            |policy: serde_json::Value| Hello { policy: Some(policy), ..job_seen(vec![], &["dense-ring"]) }.check();
        assert_eq!(with(serde_json::json!({ "of a later release": [1] })), Ok(()));
        assert!(with("x".repeat(MAX_POLICY).into()).unwrap_err().0.contains("allowed are 8192"));
    }

    #[test]
    fn buckets_make_up_the_gradient() {
        let with = |buckets: &[u64]| Hello { buckets: buckets.to_vec(), ..job_seen(vec![], &["dense-ring"]) }.check();
        assert_eq!((with(&[]), with(&[1000]), with(&[1, 999])), (Ok(()), Ok(()), Ok(())));
        for (buckets, why) in [
            (&[1, 998][..], "the buckets have 999 values, and gradient_values is 1000: they must be the same"),
            (
                &[u64::MAX, 1000],
                "the buckets have 18446744073709551615 values, and gradient_values is 1000: they must be the same",
            ),
            (&[1000, 0], "bucket 1 has 0 values, allowed is 1 or more"),
            (&[1; 4097], "4097 buckets, at most 4096"),
        ] {
            assert_eq!(with(buckets), Err(BadValue(why.into())));
        }
    }

    #[test]
    fn a_job_without_a_known_collective_is_rejected() {
        assert_eq!(seen(vec![], &["dense-ring"]), Ok(()));
        assert_eq!(seen(vec![], &["of-tomorrow", "allgather"]), Ok(()), "a newer trainer knows more");
        for none in [&[][..], &["of-tomorrow", "Dense-Ring"]] {
            let BadValue(why) = seen(vec![], none).unwrap_err();
            assert!(why.contains("job j") && why.contains("dense-ring"), "{why}");
        }
    }

    #[test]
    fn what_no_codec_takes_is_rejected() {
        let times = |value_s| Some([CodecCost { value_s, kept_s: 0.0 }; 2].into());
        let codec = |times| CodecInfo { times, ..CodecInfo::new(Family::NONE, CodecBytes::DENSE) };
        let seen = |times| seen(vec![codec(times)], &["allgather"]);
        assert_eq!(seen(times(1e-9)), Ok(()));
        let why = "codec none: codec's time per value is 0.5, allowed is 0 to 0.001 s";
        assert_eq!(seen(times(0.5)), Err(BadValue(why.into())));
    }

    #[test]
    fn no_gradient_has_the_energy_that_is_rejected() {
        let checked = |energy| {
            let outcome = TrialOutcome {
                strategy: Strategy::DENSE_RING.into(),
                gain: 1.0,
                energy: None,
                shadow_gain: Some(1.0),
                shadow_energy: Some(energy),
                comp_us: 0.0,
                sync_us: 0.0,
                iterations: 0,
            };
            let live = TrialOutcome { energy: Some(energy), shadow_energy: None, ..outcome.clone() };
            let trial = |outcome| {
                let job = JobId::new("j").unwrap();
                let outcomes = vec![outcome];
                ReportBody::Trial(TrialReport {
                    job,
                    rank: 0,
                    id: 1,
                    outcomes,
                    aborted: None,
                    cost_us: 0.0,
                    bytes: None,
                    cpu_us: None,
                    shadow_us: None,
                })
            };
            let step = StepRecord { energy: Some(energy), ..record() };
            [steps(vec![step]), trial(live), trial(outcome)].map(|body| body.check())
        };
        for good in [0.0, 1e-30, 1e40, MAX_ENERGY] {
            assert_eq!(checked(good), [const { Ok(()) }; 3]);
        }
        for (bad, as_written) in [(-1.0, "-1e0"), (f64::NAN, "NaN"), (f64::INFINITY, "inf"), (1e300, "1e300")] {
            let refused = checked(bad).map(|checked| checked.unwrap_err().0);
            let (step, of) = ("step 1", "outcome of none/dense-ring");
            let expected = [(step, "energy"), (of, "energy"), (of, "shadow_energy")];
            let expected = expected.map(|(of, what)| format!("{of}: {what} is {as_written}, allowed is 0 to 1e93"));
            assert_eq!(refused, expected);
        }
    }

    #[test]
    fn the_detail_names_value_and_range() {
        let refused = |report: LinkReport| ReportBody::Link(report).check().unwrap_err().0;
        assert_eq!(refused(LinkReport { loss_out: 1.5, ..link() }), "loss_out is 1.5, allowed is 0 to 1");
        let why = steps(vec![StepRecord { step: 7, sync_us: -1.0, ..record() }]).check().unwrap_err().0;
        assert_eq!(why, "step 7: sync_us is -1, allowed is 0 to 3600000000");
    }
}
