//! The cells of the suite, drawn once: a Latin hypercube over length of phases, ranks, model, momentum and communication.

use crate::baselines::BUDGET_SHARE;
use crate::cells::{Cell, NicOverride, Phase};
use crate::fixed::{self, rounded};
use crate::ranks::Model;
use crate::steps::Stragglers;
use anyhow::Result;
use flexcomm_truth::coefficients::Coefficients;
use flexcomm_truth::network::WITHIN_MACHINE;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;

/// What a network does over time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// The paper's C1: latency 1, 1, 50, 50 ms; bandwidth 25, 1, 1, 25.
    C1,
    /// The paper's C2: good, moderate, bad, moderate, good.
    C2,
    /// Good and bad in turns.
    Swing,
    /// Latency and bandwidth move by factors from phase to phase.
    Walk,
    /// Flows of others come and go on some NICs.
    Bursts,
    /// One NIC falls behind and recovers.
    SlowNode,
    /// What goes out is a fraction of what comes in, and how small changes.
    Asymmetric,
    /// Several ranks share a NIC, whose bandwidth changes.
    SharedNic,
    /// Bandwidth to spare: dense is best.
    Good,
}

impl Family {
    /// All, in the order of their cells.
    pub const ALL: [Self; 9] = [
        Self::C1,
        Self::C2,
        Self::Swing,
        Self::Walk,
        Self::Bursts,
        Self::SlowNode,
        Self::Asymmetric,
        Self::SharedNic,
        Self::Good,
    ];

    /// Its name in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::C1 => "c1",
            Self::C2 => "c2",
            Self::Swing => "swing",
            Self::Walk => "walk",
            Self::Bursts => "bursts",
            Self::SlowNode => "slow-node",
            Self::Asymmetric => "asymmetric",
            Self::SharedNic => "shared-nic",
            Self::Good => "good",
        }
    }

    /// Its phases, with bandwidths over a base of 1.
    fn phases(self, nics: usize, rng: &mut ChaCha8Rng) -> Vec<Level> {
        let level = |latency_ms: f64, up: f64, down: f64| Level { latency_ms, up, down, nics: Vec::new() };
        let even = |latency_ms: f64, bandwidth: f64| level(latency_ms, bandwidth, bandwidth);
        let near = |rng: &mut ChaCha8Rng| 10f64.powf(rng.random_range(-1.0..0.7));
        match self {
            Self::C1 => vec![even(1.0, 5.0), even(1.0, 0.2), even(50.0, 0.2), even(50.0, 5.0)],
            Self::C2 => vec![even(1.0, 5.0), even(10.0, 2.0), even(50.0, 0.2), even(10.0, 2.0), even(1.0, 5.0)],
            Self::Swing => {
                let (latency, depth) = (near(rng), rng.random_range(10.0..60.0f64).sqrt());
                vec![even(latency, depth), even(5.0 * latency, 1.0 / depth)]
            }
            Self::Walk => {
                let (mut latency, mut bandwidth) = (near(rng), 1.0);
                let mut next = || {
                    latency = (latency * 10f64.powf(rng.random_range(-0.4..0.4))).clamp(0.05, 60.0);
                    bandwidth = (bandwidth * 10f64.powf(rng.random_range(-0.5..0.5))).clamp(0.1, 10.0);
                    even(latency, bandwidth)
                };
                (0..12).map(|_| next()).collect()
            }
            Self::Bursts => {
                let latency = near(rng);
                let mut next = |busy: bool| {
                    let mut of_others = |nic| NicOverride {
                        nic,
                        bandwidth_factor: 1.0,
                        latency_factor: 1.0,
                        competitors: if busy && rng.random::<f64>() < 0.5 { rng.random_range(1..12) } else { 0 },
                    };
                    let odd = (0..nics).map(&mut of_others).filter(|odd| odd.competitors > 0).collect();
                    Level { nics: odd, ..even(latency, 2.0) }
                };
                (0..8).map(|phase| next(phase % 2 == 1)).collect()
            }
            Self::SlowNode => {
                let (latency, nic) = (near(rng), rng.random_range(0..nics));
                let factor = 10f64.powf(rng.random_range(-1.6..-0.6));
                let slow = NicOverride { nic, bandwidth_factor: factor, latency_factor: 3.0, competitors: 0 };
                vec![even(latency, 2.0), Level { nics: vec![slow], ..even(latency, 2.0) }]
            }
            Self::Asymmetric => {
                let latency = 3.0 * near(rng);
                vec![level(latency, 0.5, 4.0), level(latency, 0.1, 4.0), level(latency, 2.0, 4.0)]
            }
            Self::SharedNic => {
                let latency = near(rng);
                vec![even(latency, 3.0), even(latency, 0.5), even(4.0 * latency, 0.2)]
            }
            Self::Good => {
                let mut next = || even(rng.random_range(0.03..0.2), rng.random_range(0.7..1.5));
                (0..4).map(|_| next()).collect()
            }
        }
    }
}

struct Level {
    latency_ms: f64,
    up: f64,
    down: f64,
    nics: Vec<NicOverride>,
}

/// Phases that a good fixed setting takes for dense's budget of steps, within which runs come to their target.
const PHASES_OF_A_BUDGET: f64 = 6.0;
/// How many cells each family has; the first three have one more.
const EACH: usize = 5;

/// What the axes of the hypercube are cut into.
fn shuffled<T: Copy>(values: &[T], count: usize, rng: &mut ChaCha8Rng) -> Vec<T> {
    let mut all: Vec<T> = values.iter().copied().cycle().take(count).collect();
    all.shuffle(rng);
    all
}

/// The 48 cells as they are drawn; [`fitted`] gives them their bandwidths.
pub fn drawn() -> Vec<Cell> {
    let mut rng = ChaCha8Rng::seed_from_u64(18);
    let families: Vec<Family> =
        Family::ALL.iter().enumerate().flat_map(|(i, f)| vec![*f; EACH + usize::from(i < 3)]).collect();
    let count = families.len();
    let lengths = shuffled(&[10.0, 60.0, 300.0, 1800.0], count, &mut rng);
    let models = shuffled(
        &[(Model::Perceptron, 0.0), (Model::Perceptron, 0.9), (Model::Convolutional, 0.0), (Model::Convolutional, 0.9)],
        count,
        &mut rng,
    );
    // 4 and 8 ranks; 16 in three cells, 2 in one.
    let mut worlds = shuffled(&[4, 8], count, &mut rng);
    for (at, world) in [(2, 16), (20, 16), (38, 16), (13, 2)] {
        worlds[at] = world;
    }
    let mut strata: Vec<usize> = (0..count).collect();
    strata.shuffle(&mut rng);
    let mut number = 0;
    let mut cell = |(index, family): (usize, Family)| {
        number = if index > 0 && families[index - 1] == family { number + 1 } else { 1 };
        let within = (strata[index] as f64 + rng.random::<f64>()) / count as f64;
        let ratio = match family {
            // Dense is best where its transfers hide behind backward.
            Family::Good => 0.1 * 4f64.powf(within),
            _ => 0.1 * 300f64.powf(within),
        };
        let (model, momentum) = models[index];
        let ranks_per_nic = if family == Family::SharedNic && worlds[index] >= 4 { 2 } else { 1 };
        draw(
            Drawn {
                family,
                number,
                phase_s: lengths[index],
                world: worlds[index],
                model,
                momentum,
                ratio,
                ranks_per_nic,
            },
            &mut rng,
        )
    };
    let mut cells: Vec<Cell> = families.iter().copied().enumerate().map(&mut cell).collect();
    // Half to twice the time of the table, drawn last: whoever draws one more number here leaves the rest as it is.
    cells.iter_mut().for_each(|cell| cell.codec_factor = rounded(2f64.powf(rng.random_range(-1.0..1.0))));
    for cell in &mut cells {
        let mut factor = |name: &str| (name.to_owned(), rounded(2f64.powf(rng.random_range(-0.8..0.8))));
        cell.codec_factors = COMPRESSORS.iter().map(|name| factor(name)).collect();
    }
    // Runs begin in any of a family's phases.
    for cell in &mut cells {
        let first = rng.random_range(0..cell.phases.len());
        cell.phases.rotate_left(first);
    }
    // A token bucket, as providers of virtual machines have: for a tenth to four tenths of its bad phase the network is faster.
    if let Some(cell) = cells.iter_mut().rfind(|cell| cell.family == Family::Swing.name()) {
        let least = cell.phases.iter().map(|phase| phase.up_mbit).fold(f64::INFINITY, f64::min);
        let peak = least * 2f64.powf(rng.random_range(1.0..2.5));
        let seconds = cell.phase_s * rng.random_range(0.1..0.4);
        cell.burst_mbit = Some(rounded(peak));
        cell.burst_mbytes = Some(rounded((peak - least) / 8.0 * seconds));
    }
    cells
}

/// Compressors that differ from machine to machine in how long they take beside each other.
const COMPRESSORS: [&str; 8] = ["fp16", "bf16", "eightbit", "qsgd", "powersgd", "topk", "lwtopk", "mstopk"];

/// Of a NIC, at most; where ranks share it, half of what they have among themselves.
fn most_mbit(cell: &Cell) -> f64 {
    if cell.ranks_per_nic > 1 { WITHIN_MACHINE * 8e-6 / 2.0 } else { 1e5 }
}
/// Seconds of a step, at most: a run's 1,500 steps take less than five hours then, and with phases of half an hour dense's budget three
/// phases.
const LONGEST_STEP_S: f64 = 10.0;

/// Seconds of a good setting's step in a cell with phases of this length.
fn step_s(phase_s: f64, steps: u64) -> f64 {
    (PHASES_OF_A_BUDGET * phase_s / (steps as f64 * BUDGET_SHARE)).min(LONGEST_STEP_S)
}

/// A cell with bandwidths, and a size of the model, with which a dense step's transfers take as long over its computing as was drawn,
/// by the truth. Where latency alone takes longer, a step computes for longer, and where that ends, the ratio is larger than drawn.
/// `communication_ratio` is the one that came out.
pub fn fitted(drawn: &Cell, truth: &Coefficients) -> Result<Cell> {
    let ratio = drawn.communication_ratio;
    let own = drawn.model.network().parameters() as f64;
    // What the ranks' cores and the widest NIC take for a byte must fit into the ratio, too: each value is received twice.
    let most_mbit = most_mbit(drawn);
    let least = 8.0 * truth.software.byte_s.max(8e-6 / most_mbit);
    let values_per_second = (drawn.values_factor * own / drawn.compute_s).min(0.3 * ratio / least);
    let widest = drawn.phases.iter().map(|phase| phase.up_mbit.max(phase.down_mbit)).fold(0.0, f64::max);
    let cell = |compute_s: f64, mbit: f64| {
        let mut cell = Cell { compute_s: rounded(compute_s), ..drawn.clone() };
        cell.values_factor = rounded(values_per_second * cell.compute_s / own);
        for phase in &mut cell.phases {
            phase.up_mbit = rounded(phase.up_mbit * mbit / widest);
            phase.down_mbit = rounded(phase.down_mbit * mbit / widest);
        }
        for of_burst in [&mut cell.burst_mbytes, &mut cell.burst_mbit].into_iter().flatten() {
            *of_burst = rounded(*of_burst * mbit / widest);
        }
        cell
    };
    let longest = step_s(drawn.phase_s, drawn.steps).max(drawn.phase_s / 20.0).min(LONGEST_STEP_S) / (1.0 + ratio);
    let fastest = fixed::dense_transfers(&cell(drawn.compute_s, most_mbit), truth)?;
    let compute_s = drawn.compute_s.max((fastest / (0.7 * ratio)).min(longest));
    let (mut low, mut high) = (-1.0, most_mbit.log10());
    for _ in 0..14 {
        let middle = (low + high) / 2.0;
        let slow = fixed::dense_transfers(&cell(compute_s, 10f64.powf(middle)), truth)? > ratio * compute_s;
        if slow { low = middle } else { high = middle }
    }
    let fitted = cell(compute_s, 10f64.powf(high));
    Ok(Cell { communication_ratio: communication_ratio(&fitted, truth)?, ..fitted })
}

/// Of a dense step of a cell: its transfers over its computing, by the truth, in the mean of the phases.
pub fn communication_ratio(cell: &Cell, truth: &Coefficients) -> Result<f64> {
    Ok(rounded(fixed::dense_transfers(cell, truth)? / cell.compute_s))
}

struct Drawn {
    family: Family,
    number: usize,
    phase_s: f64,
    world: usize,
    model: Model,
    momentum: f32,
    ratio: f64,
    ranks_per_nic: usize,
}

fn draw(drawn: Drawn, rng: &mut ChaCha8Rng) -> Cell {
    let Drawn { family, number, phase_s, world, model, momentum, ratio, ranks_per_nic } = drawn;
    let steps = 1_500;
    let nics = world.div_ceil(ranks_per_nic);
    let levels = family.phases(nics, rng);
    // A good setting leaves a third of the communication exposed.
    let compute_s = step_s(phase_s, steps) / (1.0 + ratio / 3.0);
    // From small networks on CPUs to ResNets and transformers on GPUs.
    let values_per_second = 10f64.powf(rng.random_range(7.5..8.7));
    let values = values_per_second * compute_s;
    let own = model.network().parameters() as f64;
    let phase = |level: &Level| Phase {
        seconds: rounded(phase_s * rng.random_range(0.85..1.15)),
        latency_ms: rounded(level.latency_ms),
        up_mbit: rounded(level.up),
        down_mbit: rounded(level.down),
        nics: level.nics.clone(),
    };
    Cell {
        name: format!("{}-{number}", family.name()),
        family: family.name().into(),
        phase_s,
        world,
        model,
        momentum,
        learning_rate: if momentum > 0.0 { 0.02 } else { 0.1 },
        batch: 128,
        steps,
        seeds: vec![1, 2, 3],
        compute_s: rounded(compute_s),
        values_factor: rounded(values / own),
        codec_factor: 1.0,
        codec_factors: BTreeMap::new(),
        communication_ratio: rounded(ratio),
        ranks_per_nic,
        burst_mbytes: None,
        burst_mbit: None,
        stragglers: Stragglers { spread: 0.03, pause_share: 0.002, pause: 3.0 },
        phases: levels.iter().map(phase).collect(),
    }
}
