//! The part of `Core` that runs a strategy by a pipeline (`qsgd(s=16)`, `topk(k=0.01)+ef(vanilla)`): every
//! compressor of `flexcomm-compression`. The hook asks turn by turn which collective comes; see `flexcomm_engine::Piped`.

use crate::core::Core;
use crate::exchange::{is_cast, ring_share};
use crate::guard::{Failure, guard};
use crate::memory::Span;
use crate::session::Session;
use flexcomm_compression::codec::{Element, Travels};
use flexcomm_compression::pipeline::{Member, Step};
use flexcomm_compression::wire::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use flexcomm_compression::{Build, Method};
use flexcomm_domain::Strategy;
use flexcomm_domain::spec::CompressorSpec;
use flexcomm_engine::{EngineError, How, Param, PipeState, Piped, Ran, Shared, Turn, layers, lock};
use flexcomm_trainer::{Heard, Status, Tick};
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::time::Instant;

/// What the hook does with a turn's buffer.
const GATHER: u8 = 0;
const SUM_F32: u8 = 1;
const SUM_F16: u8 = 2;
const SUM_BF16: u8 = 3;
const OVER: u8 = 4;

/// What a pipeline runs, and where its steps are.
#[derive(Debug, Clone)]
pub struct Text {
    pub strategy: CompressorSpec,
    pub text: String,
    /// Added to the agreement's step: a loaded checkpoint goes on where it was.
    pub offset: u64,
}

impl Text {
    /// Reads and checks a text.
    pub fn read(text: &str) -> Result<Self, Failure> {
        let strategy = text.parse().and_then(CompressorSpec::trainable);
        Ok(Self::of(strategy.map_err(|e| Failure::input(format!("failed to {e}")))?))
    }

    fn of(strategy: CompressorSpec) -> Self {
        Self { strategy, text: strategy.to_string(), offset: 0 }
    }

    /// Counts up with every step that trains; the same on every rank.
    pub fn step(&self, tick: &Tick) -> u64 {
        Session::turn(tick).wrapping_add(self.offset)
    }

    /// Stands for the length in the word's check: it covers what the agreement does not know of.
    fn tag(&self, n: usize, (step, restored): (u64, bool)) -> usize {
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        let bytes = [(n as u64).to_le_bytes(), step.to_le_bytes(), [u8::from(restored); 8]];
        for byte in bytes.iter().flatten().chain(self.text.as_bytes()) {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        hash as usize
    }
}

/// A strategy as a user names it, and whether a pipeline runs it: whatever the first engine does not have, and any compressor
/// that is named without a collective.
pub fn named(text: &str) -> Result<(Strategy, bool), Failure> {
    if text.contains(['/', '@']) {
        let strategy: Strategy = text.parse().map_err(Failure::input)?;
        if !has(&strategy) {
            let why = match strategy.collective().is_art() {
                true => "AR-Topk is run of topk and mstopk with ef(vanilla)".to_owned(),
                false => {
                    format!("failed to {}", strategy.spec().trainable().err().map_or(String::new(), |e| e.to_string()))
                }
            };
            return Err(Failure::input(format!("{strategy} cannot be run: {why}")));
        }
        return Ok((strategy, !is_cast(&strategy) && Method::of(&strategy).is_none()));
    }
    let strategy = Strategy::usual(Text::read(text)?.strategy).map_err(Failure::input)?;
    Ok((strategy, !is_cast(&strategy)))
}

fn has(strategy: &Strategy) -> bool {
    let pipeline = !strategy.collective().is_art() && strategy.spec().trainable().is_ok();
    Method::of(strategy).is_some() || pipeline
}

/// Most ranks whose ones add up exactly in the elements that a compressor's messages have: the word's bits are among them.
pub fn most_ranks(spec: &CompressorSpec) -> u32 {
    match spec.travels() {
        Travels::Sums(Element::F16) => 2048,
        Travels::Sums(Element::Bf16) => 256,
        Travels::Sums(Element::F32) | Travels::Gathers => u32::MAX,
    }
}

/// Name of the type whose elements add up; empty when messages are gathered.
pub fn element(spec: &CompressorSpec) -> &'static str {
    match spec.travels() {
        Travels::Sums(Element::F32) => "float32",
        Travels::Sums(Element::F16) => "float16",
        Travels::Sums(Element::Bf16) => "bfloat16",
        Travels::Gathers => "",
    }
}

/// A compressor: name, what it does, its parameters, arguments to try.
pub type Described = (&'static str, &'static str, Vec<(&'static str, String, &'static str)>, Vec<&'static str>);

/// All of them.
pub fn compressors() -> Vec<Described> {
    let parameter = |p: &flexcomm_domain::spec::Param| (p.name, p.kind.to_string(), p.about);
    let describe = |entry: &'static flexcomm_compression::entry::Entry| {
        let parameters = entry.info.params.iter().map(parameter).collect();
        (entry.info.name, entry.info.about, parameters, entry.examples.to_vec())
    };
    flexcomm_compression::methods::all().map(describe).collect()
}

/// A bucket under a pipeline, with what its exchange needs to know.
pub(crate) struct Turns {
    pub(crate) bucket: Shared,
    index: usize,
    text: Text,
    pub(crate) step: u64,
}

impl Turns {
    /// Runs with the bucket's pipeline.
    pub(crate) fn with<T>(&self, run: impl FnOnce(&mut Piped) -> T) -> Result<T, Failure> {
        let missing = || Failure::Run(format!("failed to exchange bucket {}: it has not begun", self.index));
        lock(&self.bucket).pipe().map(run).ok_or_else(missing)
    }

    /// The turn under way, and what its word covers besides the agreement.
    fn turn(&self, values: usize) -> Result<(Turn, usize), Failure> {
        self.with(|pipe| (pipe.turn(), self.text.tag(values, (self.step, pipe.is_restored()))))
    }
}

impl Session {
    /// What runs this tick's strategy, where that is a pipeline: what the user named so, until the first decision, and whatever
    /// the first engine does not have.
    pub fn text_of(&self, tick: &Tick) -> Option<&Text> {
        let named = self.text.as_ref().filter(|_| tick.trial.is_none() && tick.version.0 == 0);
        named.or_else(|| self.piped.as_ref().filter(|piped| piped.strategy == *tick.strategy.spec()))
    }

    /// Prepares for the strategy of a step that begins.
    pub(crate) fn look_for_pipeline(&mut self, tick: &Tick) {
        let first = tick.version.0 == 0 && tick.trial.is_none();
        if tick.strategy.is_dense() || first && is_cast(&tick.strategy) || Method::of(&tick.strategy).is_some() {
            self.piped = None;
        } else if self.text_of(tick).is_none() {
            self.piped = Some(Text::of(*tick.strategy.spec()));
        }
    }

    /// Whether this trainer can run a strategy; also by how many ranks it has.
    pub fn runs(&self, strategy: &Strategy) -> bool {
        self.world <= most_ranks(strategy.spec()) && has(strategy)
    }

    pub(crate) fn turns(&self, index: usize) -> Result<Turns, Failure> {
        let tick = self.now()?;
        let none = || Failure::Run(format!("failed to exchange bucket {index}: no pipeline runs its strategy"));
        let text = self.text_of(&tick).ok_or_else(none)?.clone();
        Ok(Turns { bucket: self.store.bucket(index)?, index, step: text.step(&tick), text })
    }

    /// Whether saved pipelines can be put back.
    pub fn try_pipes(&self, model: &[Param], pipes: &[PipeState]) -> Result<(), Failure> {
        let Some(own) = &self.text else { return Ok(()) };
        let member = Member { rank: self.rank.0, world: self.world, ..Member::alone(self.seed) };
        let known: BTreeMap<u32, Param> = model.iter().map(|p| (p.id, *p)).collect();
        for (ids, state) in pipes {
            let params: Option<Vec<Param>> = ids.iter().map(|id| known.get(id).copied()).collect();
            let foreign = || Failure::Run("failed to load a pipeline: it has parameters of another model".into());
            Piped::restored(0, &own.strategy, (layers(&params.ok_or_else(foreign)?)?, member), state)?;
        }
        Ok(())
    }

    /// The agreement's step that the next backward pass begins.
    fn next_step(&self) -> u64 {
        self.riding.look().step() + u64::from(self.tick.is_some_and(|tick| tick.trial.is_none()))
    }

    /// Saved pipelines go on, and `step` comes next.
    pub fn await_pipes(&mut self, step: u64, pipes: Vec<PipeState>) {
        let now = self.next_step();
        if let Some(own) = &mut self.text {
            own.offset = step.wrapping_sub(now);
        }
        self.store.await_pipes(pipes);
    }

    /// This rank, as the pipeline of a bucket knows it.
    pub(crate) fn member(&self, index: usize) -> Member {
        let (rank, world) = (self.rank.0, self.world);
        Member { seed: self.seed, rank, world, tensor: self.store.params_before(index) as u32 }
    }

    /// Makes the bucket's pipeline, unless it is there: of its saved state, or of what is held back.
    pub(crate) fn prepare(&mut self, turns: &Turns) -> Result<(), Failure> {
        let mut bucket = lock(&turns.bucket);
        if bucket.pipe().is_some() {
            return Ok(());
        }
        let member = self.member(turns.index);
        // What a checkpoint holds is of the strategy that the user named; no candidate and no decision takes it.
        let named = self.text.as_ref().is_some_and(|text| text.strategy == turns.text.strategy);
        let tick = self.now()?;
        let own = named && tick.version.0 == 0 && tick.trial.is_none();
        let saved = if own { self.store.take_state(bucket.params()) } else { None };
        let strategy = &turns.text.strategy;
        bucket.piped(|index, params, held| {
            let layers = layers(params)?;
            if let Some(k) = strategy.k_above(layers.values()) {
                tracing::info!(
                    "{strategy}: bucket {index} has {} values, fewer than k = {k}; all are sent",
                    layers.values()
                );
            }
            // A state was tried when it was loaded; what does not fit all the same is not lost, it is in `held`.
            let restored = saved.and_then(|s| Piped::restored(index, strategy, (layers.clone(), member), &s).ok());
            match restored {
                Some(piped) => Ok(piped),
                None if held.iter().all(|value| *value == 0.0) => Ok(Piped::new(index, strategy, layers, member)),
                None => Piped::holding(index, strategy, (layers, member), held),
            }
        })?;
        Ok(())
    }
}

/// A turn's number for the agreement: only a bucket's first turn has room for a plan.
fn number(index: usize, turn: u32) -> u32 {
    index as u32 | turn << 24
}

/// Bytes that the word takes in front of what is gathered or behind what adds up.
fn word_bytes(session: &Session, index: usize, turn: &Turn) -> usize {
    match turn.how {
        _ if !turn.word => 0,
        How::Gather => session.riding.bytes(number(index, turn.number)),
        How::Sum(element) => session.riding.bits(number(index, turn.number)) * element.bytes(),
        How::Over => 0,
    }
}

/// How, elements (bytes of what is gathered), whether it is the last.
pub(crate) fn described(session: &Session, index: usize, turn: &Turn) -> (u8, usize, bool) {
    let bytes = turn.bytes + word_bytes(session, index, turn);
    let (how, each) = match turn.how {
        How::Gather => (GATHER, 1),
        How::Sum(element @ Element::F32) => (SUM_F32, element.bytes()),
        How::Sum(element @ Element::F16) => (SUM_F16, element.bytes()),
        How::Sum(element @ Element::Bf16) => (SUM_BF16, element.bytes()),
        How::Over => (OVER, 1),
    };
    (how, bytes / each, turn.last)
}

/// Zeros and ones in an element type.
fn write_elements(element: Element, values: &[f32], out: &mut [u8]) {
    let mut halves = vec![0u16; values.len()];
    match element {
        Element::F32 => {
            out.as_chunks_mut::<4>().0.iter_mut().zip(values).for_each(|(to, value)| *to = value.to_le_bytes());
            return;
        }
        Element::F16 => f32_to_f16(values, &mut halves),
        Element::Bf16 => f32_to_bf16(values, &mut halves),
    }
    out.as_chunks_mut::<2>().0.iter_mut().zip(halves).for_each(|(to, half)| *to = half.to_le_bytes());
}

fn read_elements(element: Element, from: &[u8]) -> Vec<f32> {
    if element == Element::F32 {
        return from.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    }
    let halves: Vec<u16> = from.as_chunks::<2>().0.iter().map(|bytes| u16::from_le_bytes(*bytes)).collect();
    let mut out = vec![0.0; halves.len()];
    let widen = if element == Element::F16 { f16_to_f32 } else { bf16_to_f32 };
    widen(&halves, &mut out);
    out
}

/// Takes the words off what arrived: what all ranks said (none where there is no word), and the payloads.
fn hear<'a>(
    session: &mut Session,
    (index, tag): (usize, usize),
    turn: &Turn,
    arrived: &'a [u8],
) -> Result<(Option<Heard>, Vec<&'a [u8]>), Failure> {
    let (word, number) = (word_bytes(session, index, turn), number(index, turn.number));
    match turn.how {
        How::Over => Ok((None, Vec::new())),
        How::Sum(element) => {
            let (payload, bits) = arrived.split_at(turn.bytes.min(arrived.len()));
            let heard = session.riding.hear_bits(number, tag, &read_elements(element, bits))?;
            Ok((Some(heard), vec![payload]))
        }
        How::Gather => {
            let each = (turn.bytes + word).max(1);
            let blocks: Vec<_> = arrived.chunks_exact(each).map(|block| block.split_at(word)).collect();
            let payloads = if turn.bytes + word == 0 {
                // Nobody sends anything; everybody's message is empty.
                vec![&[][..]; session.world as usize]
            } else {
                blocks.iter().map(|block| block.1).collect()
            };
            if !turn.word {
                return Ok((None, payloads));
            }
            let heard = session.riding.hear_bytes(number, tag, blocks.iter().map(|block| block.0))?;
            Ok((Some(heard), payloads))
        }
    }
}

impl Core {
    /// After the last turn of a bucket of n values: `end` makes the mean of what arrived. Answers whether it is finite.
    pub(crate) fn concluded(
        &self,
        (index, n): (usize, usize),
        arrived: &[u8],
        end: impl FnOnce(&mut Piped, Option<&Heard>, &[&[u8]]) -> Result<Ran, EngineError>,
    ) -> Result<bool, Failure> {
        let began = Instant::now();
        let turns = self.lock().turns(index)?;
        let (turn, tag) = turns.turn(n)?;
        let (heard, parts) = {
            let mut session = self.lock();
            if turn.how != How::Over {
                session.meter.landed(false);
            }
            hear(&mut session, (index, tag), &turn, arrived)?
        };
        let (ran, energy) = turns.with(|pipe| (end(pipe, heard.as_ref(), &parts), pipe.energy()))?;
        let mut session = self.lock();
        session.meter.other_work(began);
        session.meter.done(energy);
        Ok(ran? == Ran::Good)
    }
}

/// A step at the first rate, and the rates of a bucket's parameters.
pub(crate) fn at_rates(index: u64, rates: &[f64]) -> (Step, &[f64]) {
    let (first, layers) = rates.split_first().map_or((0.0, rates), |(first, layers)| (*first, layers));
    (Step { index, learning_rate: first }, layers)
}

#[pymethods]
impl Core {
    /// Compresses a bucket: how its first turn travels (0 gathered, 1 to 3 summed as float32, float16, bfloat16), its
    /// elements (bytes of what is gathered), and whether it is the last. `rates` are learning rates: the optimizer's first
    /// group's, then, where there are several groups, one for each of the bucket's parameters. Of one that is not above 0
    /// the last that was counts.
    fn speak(
        &self,
        py: Python<'_>,
        index: usize,
        gradient: (usize, usize),
        rates: Vec<f64>,
    ) -> PyResult<(u8, usize, bool)> {
        guard(py, || {
            let began = Instant::now();
            let gradient = Span::new::<f32>("the bucket", gradient.0, gradient.1)?.floats();
            let turns = {
                let mut session = self.lock();
                let turns = session.turns(index)?;
                session.prepare(&turns)?;
                turns
            };
            let (step, layers) = at_rates(turns.step, &rates);
            let turn = turns.with(|pipe| pipe.layer_rates(layers).map(|()| pipe.begin(gradient, step)))??;
            let mut session = self.lock();
            session.meter.hook_work(began);
            Ok(described(&session, index, &turn))
        })
    }

    /// Writes this rank's part of the turn of a bucket of `values` values: address and bytes of the turn's buffer.
    fn say(&self, py: Python<'_>, index: usize, values: usize, out: (usize, usize)) -> PyResult<()> {
        guard(py, || {
            let began = Instant::now();
            let out = Span::new::<u8>("the turn's buffer", out.0, out.1)?.bytes_mut();
            let turns = self.lock().turns(index)?;
            let (turn, tag) = turns.turn(values)?;
            let need = turn.bytes + word_bytes(&self.lock(), index, &turn);
            if out.len() != need {
                let got = out.len();
                return Err(Failure::Run(format!(
                    "failed to exchange bucket {index}: a buffer of {got} bytes, not {need}"
                )));
            }
            let gathered = turn.how == How::Gather;
            let (payload, word) = if gathered {
                let (word, payload) = out.split_at_mut(need - turn.bytes);
                (payload, word)
            } else {
                out.split_at_mut(turn.bytes)
            };
            let status = turns.with(|pipe| {
                pipe.write(payload);
                pipe.status()
            })?;
            let mut session = self.lock();
            write_word(&session, (number(index, turn.number), tag), (&turn, status), word)?;
            let share = ring_share(session.world, need, gathered);
            session.meter.hook_work(began);
            session.meter.launched(share);
            Ok(())
        })
    }

    /// After a turn that is not the last: the next, as [`Self::speak`] answers it; how = 4: the exchange is refused.
    fn listen(
        &self,
        py: Python<'_>,
        index: usize,
        values: usize,
        arrived: (usize, usize),
    ) -> PyResult<(u8, usize, bool)> {
        guard(py, || {
            let began = Instant::now();
            let arrived = Span::new::<u8>("what arrived", arrived.0, arrived.1)?.bytes();
            let turns = self.lock().turns(index)?;
            let (turn, tag) = turns.turn(values)?;
            let (heard, parts) = {
                let mut session = self.lock();
                session.meter.landed(true);
                hear(&mut session, (index, tag), &turn, arrived)?
            };
            let next = turns.with(|pipe| pipe.next(&heard.unwrap_or_default(), &parts))??;
            let mut session = self.lock();
            session.meter.hook_work(began);
            Ok(described(&session, index, &next))
        })
    }

    /// After the last turn: `out` becomes the mean gradient. Answers whether it is finite.
    fn conclude(&self, py: Python<'_>, index: usize, arrived: (usize, usize), out: (usize, usize)) -> PyResult<bool> {
        guard(py, || {
            let arrived = Span::new::<u8>("what arrived", arrived.0, arrived.1)?.bytes();
            let out = Span::new::<f32>("the bucket", out.0, out.1)?.floats_mut();
            self.concluded((index, out.len()), arrived, |pipe, heard, parts| pipe.end(heard, parts, out))
        })
    }

    /// The state of the pipelines for a checkpoint: text, step that comes next, and by bucket the parameters' ids and
    /// bytes. None when no text is in force.
    fn text_state(&self, py: Python<'_>) -> PyResult<Option<(String, u64, Vec<PipeState>)>> {
        guard(py, || {
            let session = self.lock();
            let (step, version) = (session.next_step(), session.riding.look().in_force().version.0);
            let Some(text) = session.text.as_ref().filter(|_| version == 0) else { return Ok(None) };
            Ok(Some((text.text.clone(), step.wrapping_add(text.offset), session.store.pipes()?)))
        })
    }
}

fn write_word(
    session: &Session,
    (number, tag): (u32, usize),
    (turn, status): (&Turn, Status),
    out: &mut [u8],
) -> Result<(), Failure> {
    match turn.how {
        _ if !turn.word => {}
        How::Over => {}
        How::Gather => session.riding.write_bytes(number, tag, status, out)?,
        How::Sum(element) => {
            let mut bits = vec![0.0; session.riding.bits(number)];
            session.riding.write_bits(number, tag, status, &mut bits)?;
            write_elements(element, &bits, out);
        }
    }
    Ok(())
}
