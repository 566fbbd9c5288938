//! The part of `Core` that the hook calls for every bucket. The session is locked for moments only; the work on a
//! bucket's values holds that bucket alone, so that the end of one bucket's collective and the next bucket's
//! compression run side by side.

use crate::core::Core;
use crate::guard::{Failure, guard};
use crate::memory::Span;
use flexcomm_compression::{HEADER_BYTES, Method, Part};
use flexcomm_domain::{Rank, Strategy};
use flexcomm_engine::{Bucket, EngineError, INDEX_HEAD, Leader, Ran, Shared, energies, lock};
use flexcomm_trainer::{HEAD_BYTES, Heard, Status, Tick};
use pyo3::prelude::*;
use std::time::Instant;

/// Elements that AR-Topk's sum carries besides values and word: ‖g_e‖ and ‖g_e‖².
const NORMS: usize = 2;

/// How a bucket is exchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Dense = 0,
    Flush = 1,
    Gather = 2,
    Art = 3,
    Text = 4,
}

/// A bucket with what its exchange needs to know.
pub(crate) struct Turn {
    pub(crate) bucket: Shared,
    pub(crate) method: Method,
    seed: u64,
}

/// What the first engine calls a strategy that no pipeline runs.
pub(crate) fn method_of(strategy: &Strategy) -> Result<Method, Failure> {
    let other = || Failure::Run(format!("failed to exchange a bucket under {strategy}: a pipeline runs that"));
    Method::of(strategy).ok_or_else(other)
}

/// Code of the type in which a strategy's buckets travel where they are cast: 0 none, 1 float16, 2 bfloat16.
fn half_code(strategy: &Strategy) -> i64 {
    match strategy.spec().compressor().name {
        "fp16" if strategy.spec().to_string() == "fp16" => 1,
        "bf16" if strategy.spec().to_string() == "bf16" => 2,
        _ => 0,
    }
}

/// Whether a strategy that a user names is DDP's allreduce, as it is or in another type.
pub(crate) fn is_cast(strategy: &Strategy) -> bool {
    strategy.is_dense() || half_code(strategy) != 0
}

/// As [`half_code`], of a step. Decisions and candidates for halves are a pipeline's, whose halves stay finite where the
/// gradient is, and whose gain is known.
fn half_of(tick: &Tick) -> i64 {
    if tick.version.0 == 0 && tick.trial.is_none() { half_code(&tick.strategy) } else { 0 }
}

impl Core {
    pub(crate) fn turn(&self, index: usize) -> Result<Turn, Failure> {
        let session = self.lock();
        let tick = session.now()?;
        let (bucket, seed) = (session.store.bucket(index)?, session.seed_of(&tick));
        Ok(Turn { bucket, method: method_of(&tick.strategy)?, seed })
    }

    fn bucket(&self, index: usize) -> Result<Shared, Failure> {
        Ok(self.lock().store.bucket(index)?)
    }

    /// AR-Topk under VAR: this rank's word, and what its selection weighs. `side` is empty where a rank leads by turns.
    pub(crate) fn bid(&self, (index, n): (usize, usize), (status, weight): (Status, f64), side: &mut [u8]) {
        if side.len() == INDEX_HEAD {
            side[..HEAD_BYTES].copy_from_slice(&self.lock().riding.head(index as u32, n, status));
            side[HEAD_BYTES..].copy_from_slice(&weight.to_le_bytes());
        }
    }

    /// AR-Topk: fills the payload with what `take` takes at the leader's indices, norms and word.
    pub(crate) fn taken(
        &self,
        index: usize,
        (leader, n): (usize, usize),
        message: &[u8],
        payload: &mut [f32],
        take: impl FnOnce(&mut Bucket, &Turn, (usize, bool), &[u8], &mut [f32]) -> Status,
    ) -> Result<(), Failure> {
        self.lock().meter.landed(true);
        let began = Instant::now();
        let turn = self.turn(index)?;
        let (head, body) = message.split_at(HEAD_BYTES.min(message.len()));
        let riding_bits = {
            let session = self.lock();
            session.riding.compare_heads(index as u32, n, std::iter::once(head))?;
            session.riding.bits(index as u32)
        };
        let leader_good = head.get(4).is_some_and(|status| status & 3 == 0);
        let k = payload.len().saturating_sub(riding_bits + NORMS);
        let (values, rest) = split(index, payload, k)?;
        let mut bucket = lock(&turn.bucket);
        let status = take(&mut bucket, &turn, (leader, leader_good), body, values);
        let norm = bucket.norm();
        drop(bucket);
        rest[0] = norm as f32;
        rest[1] = (norm * norm) as f32;
        let mut session = self.lock();
        session.riding.write_bits(index as u32, n, status, &mut rest[NORMS..])?;
        session.meter.hook_work(began);
        Ok(())
    }

    /// AR-Topk: `scatter` makes the mean of the sums in the payload.
    pub(crate) fn scattered(
        &self,
        index: usize,
        (leader, n): (usize, usize),
        payload: &mut [f32],
        scatter: impl FnOnce(&mut Bucket, &Heard, &[f32], usize) -> Result<Ran, EngineError>,
    ) -> Result<bool, Failure> {
        self.lock().meter.landed(false);
        let began = Instant::now();
        let turn = self.turn(index)?;
        let mut session = self.lock();
        let world = session.world as usize;
        let k = payload.len().saturating_sub(session.riding.bits(index as u32) + NORMS);
        let (values, rest) = split(index, payload, k)?;
        let heard = session.riding.hear_bits(index as u32, n, &rest[NORMS..])?;
        if heard.good() {
            session.observe_leader(leader as u32, [rest[0], rest[1]]);
        }
        drop(session);
        let mut bucket = lock(&turn.bucket);
        let ran = scatter(&mut bucket, &heard, values, world)?;
        let energy = bucket.energy();
        drop(bucket);
        let mut session = self.lock();
        session.meter.other_work(began);
        session.meter.done(energy);
        Ok(ran == Ran::Good)
    }
}

/// Bytes that a rank of a ring sends of a message that all sum or gather.
pub(crate) fn ring_share(world: u32, bytes: usize, gathered: bool) -> f64 {
    let world = f64::from(world);
    let times = if gathered { 1.0 } else { 2.0 / world };
    bytes as f64 * (world - 1.0) * times
}

#[pymethods]
impl Core {
    /// Begins a bucket with `n` values at `gradient` (0: not float32 on the CPU, then it is exchanged as it is, unless it
    /// can be compressed `elsewhere`: on its device, or in a copy).
    /// Answers how: (0, word elements, whether the word rides in this step, 0, type: 0 its own, 1 float16, 2 bfloat16) dense; (1, word elements) dense with what was held back; (2, block bytes,
    /// bytes of word and header) allgather; (3, index bytes, k, word elements, leader or -1) AR-Topk, -1 meaning the rank with the most energy;
    /// (4) what a pipeline runs, see `speak`.
    #[pyo3(signature = (index, gradient, n, elsewhere=false))]
    fn enter(
        &self,
        py: Python<'_>,
        index: usize,
        gradient: usize,
        n: usize,
        elsewhere: bool,
    ) -> PyResult<(u8, usize, usize, usize, i64)> {
        guard(py, || {
            let values = Span::new::<f32>("the bucket", gradient, if gradient == 0 { 0 } else { n })?;
            let mut session = self.lock();
            let tick = session.now()?;
            let shared = session.store.bucket(index)?;
            let mut bucket = lock(&shared);
            if bucket.values() != n {
                return Err(Failure::Run(format!(
                    "failed to enter bucket {index}: {n} values, known are {}",
                    bucket.values()
                )));
            }
            bucket.in_trial(tick.trial.is_some())?;
            let passed = session.hooked(index, n);
            let settled = (bucket.enter() > 0 || passed) && session.warm();
            session.settled = settled;
            let number = index as u32;
            let bits = session.riding.bits(number);
            let fallback = gradient == 0 && !elsewhere || !settled;
            if gradient != 0 {
                // What is on the host looks at what is held back too.
                bucket.come_home()?;
            }
            let text = session.text_of(&tick).map(|text| text.strategy);
            if bucket.piped_spec().is_some_and(|running| Some(running) != text.as_ref()) {
                // Another strategy is in force: what the pipeline holds back is the next one's.
                bucket.unpipe()?;
            }
            let half = half_of(&tick);
            let cast = tick.strategy.is_dense() || half != 0;
            // Copies for shadows that look on the host are no part of the strategy.
            let copied = session.shadow_on_host && session.watches();
            session.meter.faithful &= (!fallback || cast && settled) && !copied;
            let method = if text.is_none() && !cast { Some(method_of(&tick.strategy)?) } else { None };
            let kept = method.map_or(0, |method| bucket.kept(method));
            let bytes = |part| method.map_or(0, |method| bucket.message_bytes(method, part));
            let (message, index_bytes) = (bytes(Part::Whole), HEAD_BYTES + bytes(Part::Indices));
            let holds_back = bucket.holds_back();
            drop(bucket);
            if gradient != 0 && settled {
                session.observe(index, values.floats())?;
            }
            let carries = usize::from(session.carries(&tick, bits));
            if fallback || n == 0 {
                return Ok((Kind::Dense as u8, bits, carries, 0, half));
            }
            if text.is_some() {
                return Ok((Kind::Text as u8, 0, 0, 0, 0));
            }
            if cast {
                let kind = if holds_back { Kind::Flush } else { Kind::Dense };
                return Ok((kind as u8, bits, carries, 0, half));
            }
            if !tick.strategy.collective().is_art() {
                let word = session.riding.bytes(number);
                return Ok((Kind::Gather as u8, word + message, word + HEADER_BYTES, 0, 0));
            }
            let leader = match session.leader(&tick) {
                Leader::Rank(rank) => i64::from(rank),
                Leader::Largest => -1,
            };
            Ok((Kind::Art as u8, index_bytes, kept, bits + NORMS, leader))
        })
    }

    /// A bucket of `n` values of `element` bytes that DDP exchanges by itself, dense and without the hook, starts: elements of
    /// the word that travels with it, 0 for none. `words`: whether there are any.
    fn pass_by(&self, index: usize, n: usize, element: usize, words: bool) -> PyResult<usize> {
        let mut session = self.lock();
        let tick = session.now()?;
        let bits = session.pass(&tick, index, n)?;
        let bits = if words { bits } else { 0 };
        let share = ring_share(session.world, (n + bits).saturating_mul(element), false);
        session.meter.launched(share);
        Ok(bits)
    }

    /// Elements at the end of what the first bucket of this step sums, n values and the word, that are summed by themselves;
    /// `dense`: it is a dense bucket's.
    fn apart(&self, dense: bool, n: usize) -> PyResult<usize> {
        let session = self.lock();
        Ok(session.apart(&session.now()?, dense, n))
    }

    /// A collective starts in which a message of so many bytes is summed (or gathered) by all.
    fn launched(&self, bytes: usize, gathered: bool) {
        let mut session = self.lock();
        let share = ring_share(session.world, bytes, gathered);
        session.meter.launched(share);
    }

    /// So many dense buckets have arrived.
    #[pyo3(signature = (count=1))]
    fn landed(&self, count: usize) {
        let mut session = self.lock();
        for _ in 0..count {
            session.meter.landed(false);
            session.meter.done(flexcomm_compression::Energy::default());
        }
    }

    /// Writes the word of a dense bucket: zeros and ones.
    fn word(&self, index: u32, n: usize, word: usize, len: usize) -> PyResult<()> {
        let word = Span::new::<f32>("the word", word, len)?.floats_mut();
        Ok(self.lock().riding.write_bits(index, n, Status::default(), word).map_err(Failure::from)?)
    }

    /// Takes in the sums of a dense bucket's word.
    fn hear(&self, index: u32, n: usize, word: usize, len: usize) -> PyResult<()> {
        let sums = Span::new::<f32>("the word", word, len)?.floats();
        self.lock().riding.hear_bits(index, n, sums).map_err(Failure::from)?;
        Ok(())
    }

    /// Dense with what was held back: the payload becomes (gradient + residual) / N and the word.
    fn flush(&self, py: Python<'_>, index: usize, gradient: (usize, usize), payload: (usize, usize)) -> PyResult<()> {
        guard(py, || {
            let began = Instant::now();
            let gradient = Span::new::<f32>("the bucket", gradient.0, gradient.1)?.floats();
            let payload = Span::new::<f32>("the payload", payload.0, payload.1)?.floats_mut();
            let (values, word) = split(index, payload, gradient.len())?;
            let world = self.lock().world as usize;
            let status = lock(&self.bucket(index)?).flush(gradient, world, values);
            let mut session = self.lock();
            session.riding.write_bits(index as u32, gradient.len(), status, word)?;
            session.meter.hook_work(began);
            Ok(())
        })
    }

    /// The other half of `flush`, after the sum. Answers whether the result is finite.
    fn flushed(&self, py: Python<'_>, index: usize, n: usize, payload: (usize, usize)) -> PyResult<bool> {
        guard(py, || {
            self.lock().meter.landed(false);
            let payload = Span::new::<f32>("the payload", payload.0, payload.1)?.floats_mut();
            let (values, word) = split(index, payload, n)?;
            let heard = self.lock().riding.hear_bits(index as u32, n, word)?;
            let bucket = self.bucket(index)?;
            let ran = lock(&bucket).flushed(&heard, values)?;
            self.lock().meter.done(lock(&bucket).energy());
            Ok(ran == Ran::Good)
        })
    }

    /// Allgather: writes this rank's block, word first. Never fails for the gradient's sake: that is said in the block.
    fn pack(&self, py: Python<'_>, index: usize, gradient: (usize, usize), block: (usize, usize)) -> PyResult<()> {
        guard(py, || {
            let began = Instant::now();
            let gradient = Span::new::<f32>("the bucket", gradient.0, gradient.1)?.floats();
            let block = Span::new::<u8>("the block", block.0, block.1)?.bytes_mut();
            let turn = self.turn(index)?;
            let head = self.lock().riding.bytes(index as u32).min(block.len());
            let (word, message) = block.split_at_mut(head);
            let status = lock(&turn.bucket).pack(turn.method, gradient, turn.seed, message);
            let mut session = self.lock();
            session.riding.write_bytes(index as u32, gradient.len(), status, word)?;
            session.meter.hook_work(began);
            Ok(())
        })
    }

    /// Allgather: `out` becomes the mean of all blocks. Answers whether it is finite.
    fn unpack(&self, py: Python<'_>, index: usize, blocks: (usize, usize), out: (usize, usize)) -> PyResult<bool> {
        guard(py, || {
            self.lock().meter.landed(false);
            let began = Instant::now();
            let blocks = Span::new::<u8>("the blocks", blocks.0, blocks.1)?.bytes();
            let out = Span::new::<f32>("the bucket", out.0, out.1)?.floats_mut();
            let turn = self.turn(index)?;
            let (head, world) = {
                let session = self.lock();
                (session.riding.bytes(index as u32), session.world as usize)
            };
            let length = blocks.len() / world;
            let parts: Vec<(&[u8], &[u8])> =
                blocks.chunks_exact(length.max(1)).map(|b| b.split_at(head.min(b.len()))).collect();
            let heard = self.lock().riding.hear_bytes(index as u32, out.len(), parts.iter().map(|p| p.0))?;
            let messages: Vec<&[u8]> = parts.iter().map(|p| p.1).collect();
            let mut bucket = lock(&turn.bucket);
            let ran = bucket.unpack(&heard, turn.method, &messages, out)?;
            let energy = bucket.energy();
            drop(bucket);
            let mut session = self.lock();
            session.meter.other_work(began);
            session.meter.done(energy);
            Ok(ran == Ran::Good)
        })
    }

    /// AR-Topk: error feedback and, where this rank may lead, its selection. `side` takes VAR's side message.
    fn choose(
        &self,
        py: Python<'_>,
        index: usize,
        gradient: (usize, usize),
        leader: i64,
        side: (usize, usize),
    ) -> PyResult<()> {
        guard(py, || {
            let began = Instant::now();
            let gradient = Span::new::<f32>("the bucket", gradient.0, gradient.1)?.floats();
            let side = Span::new::<u8>("the side message", side.0, side.1)?.bytes_mut();
            let turn = self.turn(index)?;
            let may_lead = leader < 0 || leader == i64::from(self.lock().rank.0);
            let mut bucket = lock(&turn.bucket);
            let status = bucket.choose(turn.method, gradient, turn.seed, may_lead);
            let weight = bucket.weight();
            drop(bucket);
            self.bid((index, gradient.len()), (status, weight), side);
            self.lock().meter.hook_work(began);
            Ok(())
        })
    }

    /// AR-Topk under VAR: the rank with the most energy, from all side messages.
    fn leader(&self, index: u32, n: usize, sides: (usize, usize)) -> PyResult<usize> {
        let sides = Span::new::<u8>("the side messages", sides.0, sides.1)?.bytes();
        let mut session = self.lock();
        session.meter.landed(true);
        session.riding.compare_heads(index, n, sides.chunks_exact(INDEX_HEAD)).map_err(Failure::from)?;
        Ok(energies(sides))
    }

    /// AR-Topk: the leader's message.
    fn indices(&self, py: Python<'_>, index: usize, n: usize, message: (usize, usize)) -> PyResult<()> {
        guard(py, || {
            let message = Span::new::<u8>("the indices", message.0, message.1)?.bytes_mut();
            let (head, body) = message.split_at_mut(HEAD_BYTES.min(message.len()));
            let status = lock(&self.bucket(index)?).write_indices(body);
            head.copy_from_slice(&self.lock().riding.head(index as u32, n, status));
            Ok(())
        })
    }

    /// AR-Topk: the payload becomes this rank's values at the leader's indices, its norms and the word.
    fn take(
        &self,
        py: Python<'_>,
        index: usize,
        leader_and_values: (usize, usize),
        message: (usize, usize),
        payload: (usize, usize),
    ) -> PyResult<()> {
        guard(py, || {
            let message = Span::new::<u8>("the indices", message.0, message.1)?.bytes();
            let payload = Span::new::<f32>("the payload", payload.0, payload.1)?.floats_mut();
            self.taken(index, leader_and_values, message, payload, |bucket, turn, leader, body, values| {
                bucket.take(turn.method, leader, body, values)
            })
        })
    }

    /// AR-Topk: `out` becomes the mean at the leader's indices, zero elsewhere. Answers whether it is finite.
    fn scatter(
        &self,
        py: Python<'_>,
        index: usize,
        leader: usize,
        payload: (usize, usize),
        out: (usize, usize),
    ) -> PyResult<bool> {
        guard(py, || {
            let payload = Span::new::<f32>("the payload", payload.0, payload.1)?.floats_mut();
            let out = Span::new::<f32>("the bucket", out.0, out.1)?.floats_mut();
            self.scattered(index, (leader, out.len()), payload, |bucket, heard, sums, world| {
                bucket.scatter(heard, sums, world, out)
            })
        })
    }

    /// Bytes of VAR's side message.
    #[classattr]
    const SIDE_BYTES: usize = INDEX_HEAD;

    /// Says once that something else runs than what was decided.
    fn instead(&self, what: String) {
        let mut session = self.lock();
        // All ranks do the same; one line is enough.
        if session.rank == Rank(0) {
            session.instead(what);
        }
    }
}

fn split(index: usize, payload: &mut [f32], at: usize) -> Result<(&mut [f32], &mut [f32]), Failure> {
    let len = payload.len();
    let text = || Failure::Run(format!("failed to exchange bucket {index}: a payload of {len} is too short for {at}"));
    payload.split_at_mut_checked(at).ok_or_else(text)
}
