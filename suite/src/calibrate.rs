//! Coefficients of the truth for a machine, from what `python/bench/calibrate.py` measured there: those with which the truth's own
//! execution of the same collectives and steps takes as long.

use crate::cells::{Cell, Net, Phase};
use crate::fixed::{self, Curve};
use crate::ranks::{Carried, Data, Model};
use crate::steps::{self, Programs, Stragglers};
use anyhow::{Context, Result, bail, ensure};
use flexcomm_compression::codec::Element;
use flexcomm_domain::Strategy;
use flexcomm_domain::spec::CompressorSpec;
use flexcomm_exchange::How;
use flexcomm_truth::coefficients::{CodecSeconds, Coefficients, Tcp};
use flexcomm_truth::job::{self, Collective, Do, Software, Step};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// What was measured: the output of `calibrate.py`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Measured {
    /// N.
    pub world: usize,
    /// Of every link, one way, seconds.
    pub latency_s: f64,
    /// Of every NIC, each way; none without a limit that matters.
    #[serde(default)]
    pub mbit: Option<f64>,
    /// One byte there and back over TCP, seconds.
    pub round_trip_s: f64,
    /// Bytes that fit into the links' queues; the truth's, where it is not given.
    pub buffer_bytes: Option<f64>,
    /// In rows of [`Measured::row`] each.
    pub collectives: Vec<MeasuredCollective>,
    /// Collectives one after the other, between two barriers.
    pub row: usize,
    /// Seconds of a step that exchanges nothing, with all ranks at it.
    pub compute_s: f64,
    /// Whether all ranks share one processor.
    #[serde(default)]
    pub one_processor: bool,
    /// Images of a rank in a step.
    pub batch: usize,
    /// Steps of the perceptron by strategy.
    pub steps: BTreeMap<String, MeasuredStep>,
}

impl Measured {
    /// Seconds that a rank computes for when it has a processor to itself.
    fn rank_compute_s(&self) -> f64 {
        self.compute_s / if self.one_processor { self.world as f64 } else { 1.0 }
    }
}

/// Seconds of one collective.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct MeasuredCollective {
    /// torch's name of it: `all_reduce`, `all_gather`, `broadcast`.
    pub what: String,
    /// Of a rank's part.
    pub bytes: usize,
    /// The median.
    pub seconds: f64,
    /// The first decile.
    pub first_decile: f64,
}

impl MeasuredCollective {
    fn how(&self) -> Result<fn(u32) -> How> {
        Ok(match self.what.as_str() {
            "all_reduce" => |_| How::Sum(Element::F32),
            "all_gather" => |_| How::Gather,
            "broadcast" => How::Broadcast,
            other => bail!("unknown collective {other}; known are all_reduce, all_gather and broadcast"),
        })
    }
}

/// Seconds of a step.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct MeasuredStep {
    /// The median.
    pub seconds: f64,
}

/// Which of the measured seconds count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// The median, on a machine that does nothing else.
    Median,
    /// The first decile, where others keep it busy.
    FirstDecile,
}

/// What was found.
#[derive(Debug, Clone, PartialEq)]
pub struct Calibrated {
    /// For `--truth`.
    pub truth: Coefficients,
    /// By how much the truth's collectives are off, the root of the mean square of `truth / measured - 1`.
    pub error: f64,
    /// Each collective and step, as measured and by the truth, seconds.
    pub rows: Vec<Row>,
}

/// A time on both sides.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Of what.
    pub what: String,
    /// Seconds.
    pub measured_s: f64,
    /// The same.
    pub truth_s: f64,
    /// Of a step: where the factor of its compressor's times ends without one that fits.
    pub bound: Option<f64>,
}

/// A bandwidth that is no limit.
const UNLIMITED_MBIT: f64 = 1e5;
/// Steps of which the median is taken, and those before them.
const STEPS: u64 = 25;
const WARM_UP: usize = 5;
/// Rows of collectives, so that windows have grown in the last one.
const ROWS: usize = 8;

/// Fits the software's seconds to the collectives, then the compressors' to the steps. What is not measured is taken from `base`.
pub fn calibrate(measured: &Measured, level: Level, base: &Coefficients, data: &Arc<Data>) -> Result<Calibrated> {
    let Measured { world, latency_s, round_trip_s, .. } = *measured;
    ensure!(world >= 2 && measured.row > 0, "{world} ranks and rows of {} cannot be calibrated from", measured.row);
    let tcp = Tcp { stack_s: (round_trip_s - 2.0 * latency_s).max(0.0), ..base.tcp };
    let software = Software { one_processor: measured.one_processor, ..base.software };
    let base = &Coefficients {
        tcp,
        software,
        buffer_bytes: measured.buffer_bytes.unwrap_or(base.buffer_bytes),
        ..base.clone()
    };
    let cell = cell(measured);
    let seconds = |one: &MeasuredCollective| match level {
        Level::Median => one.seconds,
        Level::FirstDecile => one.first_decile,
    };
    let wanted: Vec<f64> = measured.collectives.iter().map(seconds).collect();
    let times = |found: Seconds| -> Result<Vec<f64>> {
        let truth = Coefficients { software: with(base.software, found), ..base.clone() };
        measured.collectives.iter().map(|one| collective_s(&cell, &truth, one, measured.row)).collect()
    };
    let found = fitted(&wanted, &times)?;
    let of_truth = times(found)?;
    let squares = of_truth.iter().zip(&wanted).map(|(truth, one)| (truth / one - 1.0).powi(2)).sum::<f64>();
    let error = (squares / wanted.len().max(1) as f64).sqrt();
    let mut truth = Coefficients { software: with(base.software, found), ..base.clone() };
    let row = |(one, truth_s): (&MeasuredCollective, f64)| {
        let what = format!("{} of {} bytes", one.what, one.bytes);
        Row { what, measured_s: seconds(one), truth_s, bound: None }
    };
    let mut rows: Vec<Row> = measured.collectives.iter().zip(of_truth).map(row).collect();
    let curves = measured.steps.keys().map(|setting| Ok((setting, fixed::sizes(&cell, setting, data)?)));
    let curves: BTreeMap<&String, Curve> = curves.collect::<Result<_>>()?;
    let Codecs { found, bounds } = codecs(measured, &cell, &truth, &curves)?;
    truth.codec.extend(found);
    for (setting, step) in &measured.steps {
        let truth_s = step_s(&cell, &truth, &curves[setting])?;
        let (what, bound) = (format!("a step by {setting}"), bounds.get(setting).copied());
        rows.push(Row { what, measured_s: step.seconds, truth_s, bound });
    }
    Ok(Calibrated { truth, error, rows })
}

/// The job and the network that were measured on.
fn cell(measured: &Measured) -> Cell {
    let mbit = measured.mbit.unwrap_or(UNLIMITED_MBIT);
    let phase =
        Phase { seconds: 1e6, latency_ms: 1e3 * measured.latency_s, up_mbit: mbit, down_mbit: mbit, nics: Vec::new() };
    Cell {
        name: "calibration".to_owned(),
        family: "calibration".to_owned(),
        phase_s: phase.seconds,
        world: measured.world,
        model: Model::Perceptron,
        momentum: 0.9,
        learning_rate: 0.01,
        batch: measured.world * measured.batch,
        steps: WARM_UP as u64 + STEPS,
        seeds: vec![1],
        compute_s: measured.rank_compute_s(),
        values_factor: 1.0,
        codec_factor: 1.0,
        codec_factors: BTreeMap::new(),
        communication_ratio: 1.0,
        ranks_per_nic: 1,
        burst_mbytes: None,
        burst_mbit: None,
        stragglers: Stragglers { spread: 0.0, pause_share: 0.0, pause: 0.0 },
        phases: vec![phase],
    }
}

/// Seconds of one of a row of collectives, each begun when the one before it has ended.
fn collective_s(cell: &Cell, truth: &Coefficients, one: &MeasuredCollective, row: usize) -> Result<f64> {
    let mut programs = Programs::new(truth.gather);
    let how = one.how()?;
    let mut collective = |number: usize| -> Result<Collective> {
        // Broadcasts come from all ranks in turn.
        let carried = Carried { how: how((number % cell.world) as u32), bytes: one.bytes, fixed: 0 };
        let program = programs.of(carried, Strategy::DENSE_RING.collective(), cell.world as u32, 1.0)?;
        Ok(Collective { group: 0, program })
    };
    let script: Vec<Do> = (0..row).flat_map(|number| [Do::Launch(number), Do::Wait(number)]).collect();
    let collectives = (0..row).map(&mut collective).collect::<Result<_>>()?;
    let step = Step { ranks: vec![script; cell.world], collectives };
    let (mut net, mut start, mut took) = (Net::<()>::new(cell, truth, 1), 0.0, 0.0);
    for _ in 0..ROWS {
        let starts = vec![start; cell.world];
        let times = job::run(&mut net.network, &net.mesh, truth.software, &step, &starts, &mut |_, _| ())?;
        took = times.ranks[0].ended - start;
        // A barrier.
        start = times.ranks.iter().map(|rank| rank.ended).fold(start, f64::max);
    }
    Ok(took / row as f64)
}

/// Seconds of the software: to begin a collective, for a round, for a byte.
type Seconds = [f64; 3];

fn with(software: Software, [collective_s, round_s, byte_s]: Seconds) -> Software {
    Software { collective_s, round_s, byte_s, ..software }
}

/// Those with which `times` come nearest to what was measured: least squares of the errors over each time, none below 0. Times are
/// nearly linear in them, so each solution of what is linear around the last one is nearer.
fn fitted(measured: &[f64], times: &impl Fn(Seconds) -> Result<Vec<f64>>) -> Result<Seconds> {
    const STEPS: Seconds = [2e-5, 2e-5, 2e-10];
    let mut found = [1e-4, 1e-4, 1e-9];
    for _ in 0..8 {
        let now = times(found)?;
        let mut slopes: Vec<Vec<f64>> = Vec::new();
        for (part, step) in STEPS.iter().enumerate() {
            let mut more = found;
            more[part] += step;
            let slope =
                times(more)?.into_iter().zip(&now).zip(measured).map(|((more, now), one)| (more - now) / step / one);
            slopes.push(slope.collect());
        }
        let mut left: Vec<f64> = now.iter().zip(measured).map(|(now, one)| 1.0 - now / one).collect();
        // One part after the other takes what is left, until they no longer move.
        for _ in 0..10_000 {
            for (part, slope) in slopes.iter().enumerate() {
                let along: f64 = slope.iter().zip(&left).map(|(slope, left)| slope * left).sum();
                let all = slope.iter().map(|slope| slope * slope).sum::<f64>().max(f64::MIN_POSITIVE);
                let new = (found[part] + along / all).max(0.0);
                left.iter_mut().zip(slope).for_each(|(left, slope)| *left -= slope * (new - found[part]));
                found[part] = new;
            }
        }
    }
    Ok(found)
}

/// The median step in the truth, seconds.
fn step_s(cell: &Cell, truth: &Coefficients, curve: &Curve) -> Result<f64> {
    let ends = fixed::replay(cell, truth, 1, curve)?;
    let mut took: Vec<f64> = ends[WARM_UP - 1..].windows(2).map(|pair| pair[1] - pair[0]).collect();
    took.sort_by(f64::total_cmp);
    Ok(took[took.len() / 2])
}

/// What compressors are found to take.
struct Codecs {
    /// By compressor with its parameters.
    found: BTreeMap<String, CodecSeconds>,
    /// By setting: the bound at which its factor ended.
    bounds: BTreeMap<String, f64>,
}

/// What a compressor may take over the table's times.
const LEAST: f64 = 1e-2;
const MOST: f64 = 1e4;

/// Seconds of each compressor with its parameters, in the mean over the settings that use it: the table's times a factor with which a
/// step takes as long as measured.
fn codecs(measured: &Measured, cell: &Cell, truth: &Coefficients, curves: &BTreeMap<&String, Curve>) -> Result<Codecs> {
    let mut found: BTreeMap<String, Vec<CodecSeconds>> = BTreeMap::new();
    let mut bounds = BTreeMap::new();
    for (setting, curve) in curves {
        let strategy: Strategy = setting.parse().with_context(|| format!("failed to read the strategy {setting}"))?;
        let compressor = setting.split(['/', '+']).next().unwrap_or_default().to_owned();
        let is_dense = *strategy.spec() == CompressorSpec::NONE;
        let copied = CodecSeconds { compress_value_s: 1e-9, ..CodecSeconds::default() };
        let of_table = if is_dense { copied } else { steps::codec(truth, cell, strategy.spec())? };
        let wanted = measured.steps[*setting].seconds;
        let (mut low, mut high) = (LEAST, MOST);
        for _ in 0..24 {
            let middle = (low * high).sqrt();
            let mut tried = truth.clone();
            tried.codec.insert(compressor.clone(), of_table.scaled(middle));
            if step_s(cell, &tried, curve)? < wanted { low = middle } else { high = middle }
        }
        // Without any of its time a step takes longer, or with that much of it less.
        let bound = [(low == LEAST, LEAST), (high == MOST, MOST)].into_iter().find(|(is_at, _)| *is_at);
        bounds.extend(bound.map(|(_, bound)| ((*setting).clone(), bound)));
        found.entry(compressor).or_default().push(of_table.scaled((low * high).sqrt()));
    }
    let mean = |all: &[CodecSeconds]| {
        let of = |part: fn(&CodecSeconds) -> f64| all.iter().map(part).sum::<f64>() / all.len() as f64;
        CodecSeconds {
            compress_value_s: of(|codec| codec.compress_value_s),
            compress_kept_s: of(|codec| codec.compress_kept_s),
            decompress_value_s: of(|codec| codec.decompress_value_s),
            decompress_kept_s: of(|codec| codec.decompress_kept_s),
        }
    };
    Ok(Codecs { found: found.iter().map(|(name, all)| (name.clone(), mean(all))).collect(), bounds })
}

impl fmt::Display for Calibrated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "collectives are within {:.0} % (root mean square)\n", 100.0 * self.error)?;
        writeln!(f, "| what | measured ms | truth ms |\n|---|---|---|")?;
        let ms = |seconds: f64| 1e3 * seconds;
        self.rows.iter().try_for_each(|Row { what, measured_s, truth_s, bound }| {
            let flag = bound
                .map_or(String::new(), |bound| format!(" (no fit: its compressor at {bound} of the table's times)"));
            writeln!(f, "| {what}{flag} | {:.2} | {:.2} |", ms(*measured_s), ms(*truth_s))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOP_K: &str = "topk(k=0.01)+ef(vanilla)/allgather";

    /// What a machine would show that is as the truth says.
    fn as_executed(truth: &Coefficients, data: &Arc<Data>) -> Measured {
        let of =
            |what: &str, bytes| MeasuredCollective { what: what.to_owned(), bytes, seconds: 0.0, first_decile: 0.0 };
        let kinds = ["all_reduce", "all_gather", "broadcast"];
        let mut measured = Measured {
            world: 4,
            latency_s: 2e-3,
            mbit: Some(1e3),
            round_trip_s: 4e-3 + truth.tcp.stack_s,
            buffer_bytes: Some(1e8),
            one_processor: false,
            collectives: kinds.iter().flat_map(|what| [64, 65_536, 1 << 20].map(|bytes| of(what, bytes))).collect(),
            row: 4,
            compute_s: 0.01,
            batch: 16,
            steps: [fixed::DENSE, TOP_K].map(|setting| (setting.to_owned(), MeasuredStep { seconds: 0.0 })).into(),
        };
        let truth = &Coefficients { buffer_bytes: 1e8, ..truth.clone() };
        let cell = cell(&measured);
        for one in &mut measured.collectives {
            one.first_decile = collective_s(&cell, truth, one, 4).unwrap();
            one.seconds = 3.0 * one.first_decile;
        }
        for (setting, step) in &mut measured.steps {
            step.seconds = step_s(&cell, truth, &fixed::sizes(&cell, setting, data).unwrap()).unwrap();
        }
        measured
    }

    #[test]
    fn planted_coefficients_are_found_again() {
        let (frozen, data) = (Coefficients::frozen(), Arc::new(Data::synthetic(4)));
        let mut planted = frozen.clone();
        planted.software = Software { collective_s: 1e-3, round_s: 3e-4, byte_s: 5e-9, ..frozen.software };
        planted.tcp.stack_s = 2e-4;
        planted.codec.insert("topk".to_owned(), frozen.codec["topk"].scaled(20.0));
        let found = calibrate(&as_executed(&planted, &data), Level::FirstDecile, &frozen, &data).unwrap();
        let near = |found: f64, planted: f64| (found / planted - 1.0).abs() < 0.05;
        let Software { collective_s, round_s, byte_s, .. } = found.truth.software;
        assert!(near(collective_s, 1e-3) && near(round_s, 3e-4) && near(byte_s, 5e-9), "{:?}", found.truth.software);
        assert!(near(found.truth.tcp.stack_s, 2e-4) && found.error < 0.02, "{found}");
        assert!(near(found.truth.codec["topk(k=0.01)"].compress_value_s, planted.codec["topk"].compress_value_s));
        assert!(found.rows.iter().all(|row| near(row.truth_s, row.measured_s)), "{found}");
    }

    #[test]
    fn a_step_that_no_compressor_fits_is_told() {
        let (frozen, data) = (Coefficients::frozen(), Arc::new(Data::synthetic(4)));
        let mut measured = as_executed(&frozen, &data);
        let cell = cell(&measured);
        let curves: BTreeMap<String, Curve> = measured
            .steps
            .keys()
            .map(|setting| (setting.clone(), fixed::sizes(&cell, setting, &data).unwrap()))
            .collect();
        let curves: BTreeMap<&String, Curve> = curves.iter().map(|(setting, curve)| (setting, curve.clone())).collect();
        let mut bounds = |seconds: f64| {
            measured.steps.insert(TOP_K.to_owned(), MeasuredStep { seconds });
            codecs(&measured, &cell, &frozen, &curves).unwrap().bounds.get(TOP_K).copied()
        };
        let as_truth = step_s(&cell, &frozen, &curves[&TOP_K.to_owned()]).unwrap();
        assert_eq!([1e-6, as_truth, 1e6].map(&mut bounds), [Some(LEAST), None, Some(MOST)]);
        let row = Row { what: "a step by x".into(), measured_s: 1.0, truth_s: 2.0, bound: Some(LEAST) };
        let text = Calibrated { truth: frozen.clone(), error: 0.0, rows: vec![row] }.to_string();
        assert!(
            text.contains("| a step by x (no fit: its compressor at 0.01 of the table's times) | 1000.00 |"),
            "{text}"
        );
    }

    #[test]
    fn what_cannot_be_calibrated_from_is_named() {
        let (frozen, data) = (Coefficients::frozen(), Arc::new(Data::synthetic(4)));
        let one = MeasuredCollective { what: "gather".to_owned(), bytes: 1, seconds: 1.0, first_decile: 1.0 };
        let measured = Measured {
            world: 4,
            latency_s: 0.0,
            mbit: None,
            round_trip_s: 1e-4,
            buffer_bytes: None,
            one_processor: false,
            collectives: vec![one],
            row: 4,
            compute_s: 0.01,
            batch: 16,
            steps: BTreeMap::new(),
        };
        let error = |measured: &Measured| calibrate(measured, Level::Median, &frozen, &data).unwrap_err().to_string();
        assert!(error(&measured).contains("unknown collective gather"));
        assert!(error(&Measured { world: 1, ..measured }).contains("1 ranks"));
    }
}
