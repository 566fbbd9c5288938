//! The large problem: a ratio per bucket (1 to 60 buckets) and one collective for all of them.
//!
//! Times and kept energy add up over buckets, so for any price of energy in seconds the best plan is found
//! bucket by bucket. [`BucketProblem::weighted`] does that exactly; the search of [`crate::nsga`] starts from
//! such plans and finds what no price leads to.

use crate::problem::ProblemError;
use crate::terms::Paths;
use crate::{Load, Problem, Profile, Space, pareto, prior_gain};
use flexcomm_domain::{Collective, CompressionRatio, Family, Gain, Selection, Strategy};
use serde::{Deserialize, Serialize};

/// Most buckets of a problem: DDP makes a few tens for the largest models on 25 MB buckets.
pub const MAX_BUCKETS: usize = 60;

/// Most plans that [`BucketProblem::exact_front`] lists: five ratios and three collectives over five buckets are
/// 9,375 plans and take milliseconds; over six buckets searching is faster.
pub const MAX_ENUMERATED: usize = 20_000;

/// A bucket of the gradient.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Bucket {
    /// Values in it.
    pub values: u64,
    /// Its share of the gradient's energy, in any unit; above 0.
    pub energy: f64,
    /// gain(c) and t_comp(c) of this bucket; absent: the prior's gain, and the time that [`Problem::t_comp`] says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<Profile>,
}

/// A ratio for each bucket and a collective for all.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BucketPlan {
    /// How values travel.
    pub collective: Collective,
    /// One ratio per bucket; all 1 when the collective is dense.
    pub crs: Vec<CompressionRatio>,
}

/// A plan and its objectives.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlanPoint {
    /// What to do.
    pub plan: BucketPlan,
    /// (t_comp in s, t_sync in s, 1/gain).
    pub objectives: [f64; 3],
}

/// Why buckets make no problem.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum BucketError {
    /// None, or more than [`MAX_BUCKETS`].
    #[error("failed to pose a problem of {0} buckets, allowed are 1 to {MAX_BUCKETS}")]
    Count(usize),
    /// An empty bucket or an energy that is no positive number.
    #[error("failed to pose a problem: bucket {bucket} has {values} values and energy {energy}, both must be above 0")]
    Bucket {
        /// Which.
        bucket: usize,
        /// As given.
        values: u64,
        /// As given.
        energy: f64,
    },
    /// A prediction failed.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// More plans than [`MAX_ENUMERATED`].
    #[error("failed to list {0} plans, at most {MAX_ENUMERATED} are; search them instead")]
    TooMany(f64),
}

/// What one level of one bucket costs and keeps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Cell {
    pub t_comp: f64,
    pub t_sync: f64,
    /// Share of the whole gradient's energy.
    pub kept: f64,
}

/// The problem as tables: cost and kept energy of every (sparse collective, bucket, level).
#[derive(Debug, Clone, PartialEq)]
pub struct BucketProblem {
    collectives: Vec<Collective>,
    levels: Vec<CompressionRatio>,
    /// Values of each bucket.
    values: Vec<u64>,
    compressor: Family,
    selection: Selection,
    /// [collective][bucket][level], flat.
    cells: Vec<Cell>,
    dense: Vec<PlanPoint>,
    gain_floor: f64,
}

impl BucketProblem {
    /// Tabulates `problem` (its links, codecs, coefficients) over the buckets. Candidates are the ratios of
    /// `space` below 1 and its collectives; every sparse collective carries `compressor`. Dense plans always exist.
    pub fn new(problem: &Problem, buckets: &[Bucket], space: &Space, compressor: Family) -> Result<Self, BucketError> {
        check(buckets)?;
        let mut levels: Vec<CompressionRatio> = space.crs.iter().copied().filter(|c| !c.is_dense()).collect();
        levels.sort_by(|a, b| a.get().total_cmp(&b.get()));
        levels.dedup();
        let table = Table { problem, buckets, paths: Paths::new(&problem.links), compressor };
        let values = buckets.iter().map(|b| b.values).collect();
        let mut out = Self {
            collectives: vec![],
            levels,
            values,
            compressor,
            selection: space.selections.first().copied().unwrap_or(Selection::Star),
            cells: vec![],
            dense: vec![],
            gain_floor: 0.0,
        };
        for &collective in &space.collectives {
            out.add(&table, collective)?;
        }
        if out.dense.is_empty() {
            out.dense.push(table.dense(Collective::DenseRing)?);
        }
        Ok(out)
    }

    /// Plans that keep less than this are not feasible. Default 0: all are.
    pub fn with_gain_floor(mut self, floor: f64) -> Self {
        self.gain_floor = floor;
        self
    }

    fn add(&mut self, table: &Table<'_>, collective: Collective) -> Result<(), BucketError> {
        if collective.is_allreduce() {
            self.dense.push(table.dense(collective)?);
            return Ok(());
        }
        let selection = collective.is_art().then_some(self.selection);
        let at = |c: &CompressionRatio| Strategy::new(table.compressor.at(*c).ok()?, collective, selection).ok();
        let strategies: Option<Vec<Strategy>> = self.levels.iter().map(at).collect();
        // A compressor that does not travel this way (fp16 with an allgather) is no candidate.
        let (Some(strategies), false) = (strategies, self.levels.is_empty() || self.collectives.contains(&collective))
        else {
            return Ok(());
        };
        self.collectives.push(collective);
        for bucket in 0..self.buckets() {
            let row = table.row(bucket, &strategies)?;
            self.cells.extend(row);
        }
        Ok(())
    }

    /// Buckets.
    pub fn buckets(&self) -> usize {
        self.values.len()
    }

    /// The plan as a strategy: its collective, and as ratio the one of all buckets, or else the share of all values that it keeps.
    pub fn strategy(&self, plan: &BucketPlan) -> Strategy {
        let selection = plan.collective.is_art().then_some(self.selection);
        let spec = self.ratio(plan).and_then(|cr| self.compressor.at(cr).ok());
        let sparse = spec.and_then(|spec| Strategy::new(spec, plan.collective, selection).ok());
        // Whole buckets that are too small to leave anything out make a sparse plan dense in all but name.
        Strategy::dense(plan.collective).ok().or(sparse).unwrap_or(Strategy::DENSE_RING)
    }

    fn ratio(&self, plan: &BucketPlan) -> Option<CompressionRatio> {
        if let Some(same) = plan.crs.first().filter(|first| plan.crs.iter().all(|cr| cr == *first)) {
            return Some(*same);
        }
        let kept = |(values, cr): (&u64, &CompressionRatio)| cr.keep(*values as usize) as f64;
        let kept: f64 = self.values.iter().zip(&plan.crs).map(kept).sum();
        CompressionRatio::new(kept / self.values.iter().map(|v| *v as f64).sum::<f64>()).ok()
    }

    /// Ratios by rising c.
    pub fn levels(&self) -> &[CompressionRatio] {
        &self.levels
    }

    /// Sparse collectives; genes and tables refer to them by position.
    pub fn collectives(&self) -> &[Collective] {
        &self.collectives
    }

    /// The dense plans.
    pub fn dense(&self) -> &[PlanPoint] {
        &self.dense
    }

    /// The least feasible gain.
    pub fn gain_floor(&self) -> f64 {
        self.gain_floor
    }

    /// Sparse plans there are.
    pub fn size(&self) -> f64 {
        self.collectives.len() as f64 * (self.levels.len() as f64).powi(self.buckets() as i32)
    }

    /// Whether there are few enough plans to list them all.
    pub fn is_listable(&self) -> bool {
        self.size() <= MAX_ENUMERATED as f64
    }

    /// Whether there is anything to search.
    pub fn has_sparse(&self) -> bool {
        !self.collectives.is_empty()
    }

    /// One table row: a collective's cost and kept energy of one bucket at each level, as (t_comp, t_sync, kept).
    pub fn row(&self, collective: usize, bucket: usize) -> impl Iterator<Item = (f64, f64, f64)> {
        self.cells_of(collective, bucket).iter().map(|c| (c.t_comp, c.t_sync, c.kept))
    }

    pub(crate) fn cells_of(&self, collective: usize, bucket: usize) -> &[Cell] {
        let width = self.levels.len();
        let at = (collective * self.buckets() + bucket) * width;
        &self.cells[at..at + width]
    }

    /// Objectives of the plan with this collective and these levels, one per bucket.
    pub fn objectives(&self, collective: usize, levels: impl Iterator<Item = usize>) -> [f64; 3] {
        let (mut t_comp, mut t_sync, mut kept) = (0.0, 0.0, 0.0);
        for (bucket, level) in levels.enumerate() {
            let cell = self.cells_of(collective, bucket)[level];
            t_comp += cell.t_comp;
            t_sync += cell.t_sync;
            kept += cell.kept;
        }
        [t_comp, t_sync, 1.0 / kept]
    }

    /// As a plan with its objectives.
    pub fn point(&self, collective: usize, levels: &[usize]) -> PlanPoint {
        let crs = levels.iter().map(|&l| self.levels[l]).collect();
        let plan = BucketPlan { collective: self.collectives[collective], crs };
        PlanPoint { plan, objectives: self.objectives(collective, levels.iter().copied()) }
    }

    /// The dense plans, then those with one ratio for all buckets, by collective and rising ratio.
    pub fn uniform(&self) -> Vec<PlanPoint> {
        let width = self.levels.len();
        let each = (0..self.collectives.len()).flat_map(|c| (0..width).map(move |level| (c, level)));
        let sparse = each.map(|(c, level)| self.point(c, &vec![level; self.buckets()]));
        self.dense.iter().cloned().chain(sparse).collect()
    }

    /// The plan of least t_comp·comp + t_sync - price·kept, exact, as levels. `comp` weighs seconds of
    /// compressing against seconds of communicating; `price` is what the whole energy is worth, in seconds.
    pub fn weighted(&self, collective: usize, comp: f64, price: f64) -> Vec<usize> {
        let score = |c: &Cell| comp * c.t_comp + c.t_sync - price * c.kept;
        let best = |bucket: usize| {
            let cells = self.cells_of(collective, bucket);
            (0..cells.len()).min_by(|&a, &b| score(&cells[a]).total_cmp(&score(&cells[b]))).unwrap_or(0)
        };
        (0..self.buckets()).map(best).collect()
    }

    /// The exact front over all plans, dense ones included. Refuses more than [`MAX_ENUMERATED`] plans.
    pub fn exact_front(&self) -> Result<Vec<PlanPoint>, BucketError> {
        if !self.is_listable() {
            return Err(BucketError::TooMany(self.size()));
        }
        let mut points = self.dense.clone();
        let width = self.levels.len();
        let per_collective = if self.has_sparse() { width.pow(self.buckets() as u32) } else { 0 };
        for collective in 0..self.collectives.len() {
            for mut code in 0..per_collective {
                let digits = (0..self.buckets()).map(|_| {
                    let digit = code % width;
                    code /= width;
                    digit
                });
                let levels: Vec<usize> = digits.collect();
                points.push(self.point(collective, &levels));
            }
        }
        Ok(self.front_of(points))
    }

    /// The feasible ones that no other dominates, by rising t_sync.
    pub(crate) fn front_of(&self, points: Vec<PlanPoint>) -> Vec<PlanPoint> {
        let feasible = |p: &PlanPoint| p.objectives[2] * self.gain_floor <= 1.0 + 1e-12;
        let points: Vec<PlanPoint> = points.into_iter().filter(feasible).collect();
        let objectives: Vec<[f64; 3]> = points.iter().map(|p| p.objectives).collect();
        let mut keep = pareto::front_of(&objectives).into_iter().peekable();
        let indexed = points.into_iter().enumerate();
        let mut front: Vec<PlanPoint> = indexed.filter_map(|(i, p)| keep.next_if_eq(&i).map(|_| p)).collect();
        front.sort_by(|a, b| a.objectives[1].total_cmp(&b.objectives[1]));
        front
    }
}

fn check(buckets: &[Bucket]) -> Result<(), BucketError> {
    if buckets.is_empty() || buckets.len() > MAX_BUCKETS {
        return Err(BucketError::Count(buckets.len()));
    }
    let bad = |b: &Bucket| b.values == 0 || !(b.energy.is_finite() && b.energy > 0.0);
    match buckets.iter().position(bad) {
        Some(i) => Err(BucketError::Bucket { bucket: i, values: buckets[i].values, energy: buckets[i].energy }),
        None => Ok(()),
    }
}

struct Table<'a> {
    problem: &'a Problem,
    buckets: &'a [Bucket],
    paths: Paths<'a>,
    compressor: Family,
}

impl Table<'_> {
    fn t_sync(&self, bucket: &Bucket, strategy: &Strategy) -> Result<f64, ProblemError> {
        let load = Load { values: bucket.values, codec: self.problem.codec(strategy.family()) };
        let terms = self.paths.terms(strategy, &load);
        let t = self.problem.coefficients.get(strategy.collective(), &self.problem.backend).predict(terms);
        if t.is_finite() { Ok(t) } else { Err(ProblemError::OutOfRange((*strategy).into(), "t_sync", t)) }
    }

    fn dense(&self, collective: Collective) -> Result<PlanPoint, ProblemError> {
        let strategy = Strategy::dense(collective).unwrap_or(Strategy::DENSE_RING);
        let t_sync = self.buckets.iter().map(|b| self.t_sync(b, &strategy)).sum::<Result<f64, _>>()?;
        let crs = vec![CompressionRatio::DENSE; self.buckets.len()];
        Ok(PlanPoint { plan: BucketPlan { collective: strategy.collective(), crs }, objectives: [0.0, t_sync, 1.0] })
    }

    fn row(&self, bucket: usize, strategies: &[Strategy]) -> Result<Vec<Cell>, ProblemError> {
        let energy: f64 = self.buckets.iter().map(|b| b.energy).sum();
        let bucket = &self.buckets[bucket];
        let prior = Profile::prior(bucket.values);
        let profile = bucket.profile.as_ref().unwrap_or(&prior);
        let cell = |s: &Strategy| {
            // A curve of what selections keep says nothing of an unbiased compressor's variance.
            let gain = match s.spec().is_unbiased_without_memory() {
                true => prior_gain(s.spec(), (bucket.values, s.cr().get()), Gain::FULL),
                false => self.problem.for_all(s, profile.gain(s.cr())),
            };
            let gain = self.problem.quality(s, gain).effective_gain();
            let kept = gain * bucket.energy / energy;
            // A bucket's profile is of ranks that select for themselves and decompress every rank's message; the prior's times are
            // those of top-k.
            let t_comp = match (&bucket.profile, s.selection()) {
                (Some(profile), None) => profile.t_comp(s.cr()),
                _ => self.problem.t_comp(s, bucket.values),
            };
            Ok(Cell { t_comp, t_sync: self.t_sync(bucket, s)?, kept })
        };
        strategies.iter().map(cell).collect()
    }
}
