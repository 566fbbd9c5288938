//! Everything a decision needs, gathered by the caller; plain data that can be stored and replayed.

use crate::{Config, Memory};
use flexcomm_domain::{
    Collective, CompressionRatio, Compressor, Decision, Gain, JobId, LinkMatrix, Seconds, Strategy, Timestamp, Version,
};
use flexcomm_optimizer::{CodecBytes, CoefficientBook, Problem, Profile, Space};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Bounds of the correction of gains: beyond them something else is wrong.
const LEAST_CORRECTION: f64 = 0.1;
const MOST_CORRECTION: f64 = 10.0;

/// Where profiles are compared as a whole: the middle of the usual candidates.
const TYPICAL_CR: f64 = 0.01;

/// The state of one job and of its network at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Which job.
    pub job: JobId,
    /// N, ranks of the job.
    pub ranks: u32,
    /// Values in the fused gradient; M is 4 times that in bytes.
    pub gradient_values: u64,
    /// What moves the bytes; selects the fitted coefficients.
    pub backend: String,
    /// Exponent of the overlap of computation and communication, 1 (none) to 10; see [`Problem::overlap`].
    pub overlap: f64,
    /// What the job's trainers can do.
    pub offer: Offer,
    /// The links between its ranks; absent while no estimate covers them.
    pub links: Option<Links>,
    /// gain(c) and t_comp(c) as far as measured.
    pub profiles: Profiles,
    /// Fitted to measured times.
    pub coefficients: CoefficientBook,
    /// Median of what a step takes besides compressing and communicating: forward, backward, optimizer,
    /// waiting for data and for late ranks. Absent before the first steps were reported.
    pub compute: Option<Seconds>,
    /// The newest decision; absent before the first. Until then the job runs [`Strategy::DENSE_RING`].
    pub in_force: Option<InForce>,
    /// What the newest steps under the decision in force cost.
    pub measured: Option<Measured>,
    /// How long the job still runs, if known.
    pub remaining: Option<Seconds>,
    /// What the last call returned; default for the first.
    pub memory: Memory,
    /// The operator's settings.
    pub config: Config,
}

/// What the job's trainers can do: the intersection over its ranks.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Offer {
    /// Compressors with the bytes they really send.
    pub codecs: BTreeMap<Compressor, CodecBytes>,
    /// Collectives.
    pub collectives: Vec<Collective>,
}

/// The job's part of the link matrix, and how far it can be trusted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Links {
    /// alpha and bandwidth between every two ranks.
    pub matrix: LinkMatrix,
    /// Age of the newest sample of any kind of the link that was heard of last: whether the view is alive.
    pub age: Seconds,
    /// Age of the oldest newest sample, latency and bandwidth apart: since when everything has been measured anew.
    /// The guard accuses a strategy only of what the network as measured since cannot explain.
    pub oldest: Seconds,
    /// Least confidence over latency and bandwidth of all links, 0 to 1.
    pub confidence: f64,
}

/// Profiles per compressor. Compressors without one are predicted by the optimizer's prior.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Profiles {
    /// As measured by trials.
    pub by_compressor: BTreeMap<Compressor, Profile>,
    /// When the newest trial ended; absent while nothing is measured. A new time means a new profile.
    pub measured_at: Option<Timestamp>,
}

/// The newest decision and how far it has got.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InForce {
    /// As published.
    pub decision: Decision,
    /// The first step under it, once every rank has reported that.
    pub applied_at_step: Option<u64>,
}

/// Medians over the newest steps under the decision in force.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// The decision they ran under; 0 before the first. Measurements of another version are ignored.
    pub version: Version,
    /// How many steps.
    pub steps: u64,
    /// The whole step.
    pub t_step: Seconds,
    /// Compress and decompress.
    pub t_comp: Seconds,
    /// The collective proper.
    pub t_sync: Seconds,
    /// Gain; 1 when dense.
    pub gain: Gain,
    /// Relative half-width of the noise of `gain`, for example its median absolute deviation over its median;
    /// 0 when unknown.
    #[serde(default)]
    pub gain_spread: f64,
}

/// A snapshot whose parts do not fit together. Completes "failed to decide: ...".
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SnapshotError {
    /// The matrix is not the job's.
    #[error("the link matrix spans {matrix} ranks, the job has {ranks}")]
    Matrix {
        /// Ranks of the matrix.
        matrix: usize,
        /// Ranks of the job.
        ranks: u32,
    },
    /// A number outside its range.
    #[error("{what} is {value}, allowed is {allowed}")]
    Range {
        /// Which.
        what: &'static str,
        /// As given.
        value: f64,
        /// The allowed range.
        allowed: &'static str,
    },
    /// The decision in force belongs to another job.
    #[error("the decision in force is of job {found}, the snapshot of job {expected}")]
    Job {
        /// Of the decision.
        found: JobId,
        /// Of the snapshot.
        expected: JobId,
    },
    /// The settings make no sense.
    #[error(transparent)]
    Config(#[from] crate::ConfigError),
}

impl Snapshot {
    /// A job of which only its size is known: everything offered that the optimizer's default space holds.
    pub fn new(job: JobId, ranks: u32, gradient_values: u64) -> Self {
        Self {
            job,
            ranks,
            gradient_values,
            backend: String::new(),
            overlap: 1.0,
            offer: Offer {
                codecs: BTreeMap::from([(Compressor::TopK, CodecBytes::PAPER)]),
                collectives: Collective::ALL.to_vec(),
            },
            links: None,
            profiles: Profiles::default(),
            coefficients: CoefficientBook::default(),
            compute: None,
            in_force: None,
            measured: None,
            remaining: None,
            memory: Memory::default(),
            config: Config::default(),
        }
    }

    /// What the ranks run now.
    pub fn strategy(&self) -> Strategy {
        self.in_force.as_ref().map_or(Strategy::DENSE_RING, |f| f.decision.strategy)
    }

    /// The version in force; 0 before the first decision.
    pub fn version(&self) -> Version {
        self.in_force.as_ref().map_or(Version(0), |f| f.decision.version)
    }

    /// The measurements that belong to the decision in force.
    pub fn measured_now(&self) -> Option<&Measured> {
        self.measured.as_ref().filter(|m| m.version == self.version() && m.steps > 0)
    }

    /// Names the first thing that does not fit.
    pub fn check(&self) -> Result<(), SnapshotError> {
        self.config.check()?;
        let range = |what, value: f64, ok: bool, allowed| {
            if ok { Ok(()) } else { Err(SnapshotError::Range { what, value, allowed }) }
        };
        range("number of ranks", f64::from(self.ranks), self.ranks >= 1, "1 or more")?;
        range("number of gradient values", self.gradient_values as f64, self.gradient_values >= 1, "1 or more")?;
        range("overlap exponent", self.overlap, (1.0..=10.0).contains(&self.overlap), "1 to 10")?;
        if let Some(links) = &self.links {
            if links.matrix.ranks() != self.ranks as usize {
                return Err(SnapshotError::Matrix { matrix: links.matrix.ranks(), ranks: self.ranks });
            }
            let confidence = links.confidence;
            range("confidence of the links", confidence, (0.0..=1.0).contains(&confidence), "0 to 1")?;
        }
        if let Some(m) = &self.measured {
            range("spread of the gain", m.gain_spread, (0.0..=10.0).contains(&m.gain_spread), "0 to 10")?;
        }
        match &self.in_force {
            Some(f) if f.decision.job != self.job => {
                Err(SnapshotError::Job { found: f.decision.job.clone(), expected: self.job.clone() })
            }
            _ => Ok(()),
        }
    }

    /// The candidates: what the job offers and the settings allow.
    pub fn space(&self) -> Space {
        let enabled = |c: &Compressor| self.config.compressors.as_ref().is_none_or(|only| only.contains(c));
        Space {
            crs: self.config.crs.clone(),
            compressors: self.offer.codecs.keys().copied().filter(enabled).collect(),
            collectives: self.offer.collectives.clone(),
            selection: self.config.selection,
        }
    }

    /// The exponent that brings the profile's gain at the ratio in force to the measured one, when they differ by
    /// the threshold of the gain: gain^exponent leaves 0 and 1 and the order of ratios as they are, so that what
    /// one ratio shows tells of the others until the next trial measures them.
    pub fn gain_correction(&self) -> Option<f64> {
        let strategy = self.strategy();
        let measured = self.measured_now().filter(|m| m.steps >= self.config.least_steps)?.gain.get();
        let profile = self.profiles.by_compressor.get(&strategy.compressor())?;
        let predicted = profile.gain(strategy.cr()).get();
        let apart = crate::memory::relative(predicted, measured) >= self.config.gain_change;
        let inside = predicted < 1.0 && measured < 1.0;
        (apart && inside).then(|| (measured.ln() / predicted.ln()).clamp(LEAST_CORRECTION, MOST_CORRECTION))
    }

    /// The measured profiles, corrected by what the steps of the compressor in force show: gains fall or rise with
    /// the state of training and of the residual, which all compressors share. A compressor that no trial has
    /// measured takes the weakest measured one: what is only assumed must never look better than
    /// what is known.
    fn profiles_now(&self) -> BTreeMap<Compressor, Profile> {
        let mut profiles = self.corrected_profiles();
        let Ok(typical) = CompressionRatio::new(TYPICAL_CR) else { return profiles };
        let gain = |p: &&Profile| p.gain(typical).get();
        let weakest = profiles.values().min_by(|a, b| gain(a).total_cmp(&gain(b))).cloned();
        if let Some(weakest) = weakest {
            for compressor in self.offer.codecs.keys() {
                profiles.entry(*compressor).or_insert_with(|| weakest.clone());
            }
        }
        profiles
    }

    fn corrected_profiles(&self) -> BTreeMap<Compressor, Profile> {
        let mut profiles = self.profiles.by_compressor.clone();
        let Some(exponent) = self.gain_correction() else { return profiles };
        for profile in profiles.values_mut() {
            let mut points = profile.points().to_vec();
            for point in &mut points {
                point.gain = Gain::new(point.gain.get().powf(exponent)).unwrap_or(point.gain);
            }
            *profile = Profile::new(points).unwrap_or_else(|_| profile.clone());
        }
        profiles
    }

    /// The optimizer's problem on these links. An unknown compute time counts as 0.
    pub fn problem(&self, links: &LinkMatrix) -> Problem {
        Problem {
            values: self.gradient_values,
            links: links.clone(),
            compute: self.compute.unwrap_or(Seconds::ZERO),
            overlap: self.overlap,
            backend: self.backend.clone(),
            codecs: self.offer.codecs.clone(),
            profiles: self.profiles_now(),
            coefficients: self.coefficients.clone(),
        }
    }
}
