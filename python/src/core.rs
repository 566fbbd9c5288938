//! The class that Python sees: settings, steps, trials, state.

use crate::guard::{Failure, guard};
use crate::memory::Span;
use crate::names::{candidate, compressor};
use crate::session::{Fault, Leadership, Next, Running, Session};
use crate::telemetry::Times;
use crate::times::measure;
use flexcomm_compression::{Layers, Sizes};
use flexcomm_domain::{CodecCost, Collective, Family, JobId, Rank, Strategy, default_compressors, further_compressors};
use flexcomm_exchange::{Param, PipelineState, Shadows, layers};
use flexcomm_trainer::{Answer, Client, LEAST_GAIN};
use flexcomm_wire::{CodecInfo, Hello, PROTOCOL};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// One rank's side of one attached model. All methods may be called from any thread.
#[pyclass(frozen)]
pub struct Core {
    session: Mutex<Session>,
    /// All parameters.
    model: Vec<Param>,
}

impl Core {
    /// The session, also after a panic elsewhere: it then reports what does not fit as an error.
    pub fn lock(&self) -> MutexGuard<'_, Session> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The state of the pipelines for a checkpoint.
#[pyclass(frozen, get_all, from_py_object)]
#[derive(Clone)]
pub struct Pipelines {
    /// The compressor's canonical text.
    compressor: String,
    /// The step that comes next.
    step: u64,
    /// By bucket the parameters' ids, and bytes.
    buckets: Vec<PipelineState>,
}

#[pymethods]
impl Pipelines {
    #[new]
    fn new(compressor: String, step: u64, buckets: Vec<PipelineState>) -> Self {
        Self { compressor, step, buckets }
    }
}

/// Where a session is.
#[pyclass(frozen, get_all)]
pub struct State {
    step: u64,
    version: u64,
    /// The strategy in force.
    strategy: String,
    in_trial: bool,
    /// Whether the agent is there.
    connected: bool,
    /// Steps of this process.
    steps: u64,
}

/// What the step under way runs.
#[pyclass(name = "Tick", frozen, get_all)]
pub struct TickPy {
    /// Whether the ranks agreed on it: it is a decision, or a trial's candidate.
    agreed: bool,
    strategy: String,
    /// A number for the log.
    index: u64,
}

/// What a step cost, as `Session.costs` has it.
#[derive(IntoPyObject)]
struct Costs {
    compute: f64,
    compress: f64,
    sync: f64,
    step: f64,
    sent: u64,
    gain: f64,
}

/// A shadow's gain so far.
#[pyclass(frozen, get_all)]
pub struct ShadowGain {
    strategy: String,
    gain: f64,
    steps: u64,
}

/// The automatic choice of AR-Topk's leaders.
#[pyclass(frozen, get_all)]
pub struct AutoLeaders {
    /// star or var.
    mode: String,
    skew: f64,
    staleness: u64,
}

impl Core {
    /// Whether saved pipelines of what the user named can be put back.
    fn check_states(&self, session: &Session, states: &[PipelineState]) -> Result<(), Failure> {
        let Some(named) = session.named else { return Ok(()) };
        for (ids, state) in states {
            let params: Option<Vec<Param>> = ids.iter().map(|id| self.model.get(*id as usize).copied()).collect();
            let foreign = || Failure::Run("failed to load a pipeline: it has parameters of another model".into());
            session.store.check_state(&named.spec, &params.ok_or_else(foreign)?, state)?;
        }
        Ok(())
    }
}

/// The compressors to decide among, and those that are offered on request alone.
fn offered(named: Option<Vec<String>>) -> Result<(Vec<Family>, Vec<Family>), Failure> {
    let Some(named) = named else { return Ok((default_compressors(), further_compressors())) };
    let mut candidates = named.iter().map(|text| candidate(text)).collect::<Result<Vec<_>, _>>()?;
    candidates.sort();
    candidates.dedup();
    let others = default_compressors().into_iter().chain(further_compressors());
    Ok((candidates.clone(), others.filter(|family| !candidates.contains(family)).collect()))
}

fn hello(
    session: &Session,
    (all, costs): (&Layers, &BTreeMap<Family, [CodecCost; 2]>),
    (candidates, further): (Vec<Family>, Vec<Family>),
    backend: String,
    collectives: Vec<String>,
) -> Hello {
    let codec = |(family, on_request): (Family, bool)| CodecInfo {
        times: costs.get(&family).map(|costs| (*costs).into()),
        on_request,
        ..CodecInfo::new(family, Sizes::codec(family, all))
    };
    let candidates = std::iter::once(Family::NONE).chain(candidates).map(|family| (family, false));
    let families = candidates.chain(further.into_iter().map(|family| (family, true)));
    Hello {
        protocol: PROTOCOL,
        job: session.job.clone(),
        run: session.run,
        rank: session.rank.0,
        world: session.world,
        gradient_values: all.values() as u64,
        backend,
        codecs: families.map(codec).collect(),
        collectives,
    }
}

#[pymethods]
impl Core {
    /// `model` lists values and values per row of every parameter; its place in the list is the parameter's id. `spec`
    /// is its compressor where a pipeline is to run it until the first decision.
    #[new]
    #[pyo3(signature = (job, rank, world, model, *, strategy, selection, seed, shadow_share, spec=None))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn new(
        job: &str,
        rank: u32,
        world: u32,
        model: Vec<(usize, usize)>,
        strategy: &str,
        selection: &str,
        seed: u64,
        shadow_share: f64,
        spec: Option<&str>,
    ) -> PyResult<Self> {
        let job = JobId::new(job).map_err(Failure::input)?;
        let strategy: Strategy = strategy.parse().map_err(Failure::input)?;
        let leadership: Leadership = selection.parse()?;
        if world == 0 || rank >= world {
            return Err(Failure::input(format!("rank {rank} is none of {world} ranks")).into());
        }
        if !(shadow_share > 0.0 && shadow_share <= 1.0) {
            return Err(Failure::input(format!("shadow_share is {shadow_share}, allowed is above 0, at most 1")).into());
        }
        if let Some((len, cols)) = model.iter().find(|(len, cols)| *cols == 0 || !len.is_multiple_of(*cols)) {
            return Err(Failure::input(format!("a parameter of {len} values has no rows of {cols}")).into());
        }
        let model: Vec<Param> =
            model.into_iter().enumerate().map(|(id, (len, cols))| Param { id: id as u32, len, cols }).collect();
        let mut session = Session::new((job, Rank(rank), world), strategy, leadership, (seed, shadow_share), &model);
        session.named = spec.map(compressor).transpose()?.map(Running::of);
        Ok(Self { session: Mutex::new(session), model })
    }

    /// What the ranks agreed on, before `connect` and the first step: which run of the job this is (16 hexadecimal digits), whether
    /// rank 0 announces decisions and trials, and whether decisions are followed.
    fn agree(&self, run: &str, announced: bool, follow: bool) -> PyResult<()> {
        let mut session = self.lock();
        session.run = Some(run.parse().map_err(Failure::input)?);
        session.control.steer(announced);
        session.follow = follow;
        Ok(())
    }

    /// Starts the client of the agent behind `socket`. `collectives` are those that this backend can run; `candidates` the compressors
    /// to decide among in place of the default ones, which stay on request. What compressing takes is measured on the CUDA device of
    /// this number, if one is given.
    #[pyo3(signature = (socket, backend, collectives, candidates=None, ordinal=None))]
    fn connect(
        &self,
        py: Python<'_>,
        socket: PathBuf,
        backend: String,
        collectives: Vec<String>,
        candidates: Option<Vec<String>>,
        ordinal: Option<u32>,
    ) -> PyResult<()> {
        guard(py, || {
            if let Some(bad) = collectives.iter().find(|c| c.parse::<Collective>().is_err()) {
                return Err(Failure::input(format!("collective {bad:?} is not known")));
            }
            let all = layers(&self.model).map_err(Failure::input)?;
            let costs = ordinal.map(|ordinal| measure(ordinal, &self.model)).unwrap_or_default();
            let mut session = self.lock();
            let hello = hello(&session, (&all, &costs), offered(candidates)?, backend, collectives);
            session.reporter.connect(Client::start(&socket, hello)?);
            Ok(())
        })
    }

    /// Whether the ranks answer in the next step whether they can run a live trial.
    fn trial_asked(&self) -> bool {
        self.lock().control.asked().is_some()
    }

    /// Why this rank can run no live trials from now on; none: it can.
    #[pyo3(signature = (why))]
    fn refuse_trials(&self, why: Option<String>) {
        self.lock().trials_refused = why;
    }

    /// Starts a step, before its first bucket. Answers this rank's answer, where the ranks gather those in it.
    fn begin<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let answer = guard(py, || {
            let mut session = self.lock();
            session.begin();
            Ok(session.answer())
        })?;
        Ok(answer.map(|answer| PyBytes::new(py, &answer.encode())))
    }

    /// Writes rank 0's control message, where one is broadcast in the step under way; answers whether.
    fn write_control(&self, out: Span) -> PyResult<bool> {
        let control = &self.lock().control;
        if !control.announces() {
            return Ok(false);
        }
        let (out, message) = (out.write::<u8>("the control message")?, control.message());
        if out.len() != message.len() {
            let got = out.len();
            return Err(Failure::Run(format!("failed to write a control message: the buffer has {got} bytes")).into());
        }
        out.copy_from_slice(&message);
        Ok(true)
    }

    /// After `begin`: this rank's sample of its gradient, where the ranks send rank 0 theirs in this step; of one size on all ranks.
    fn sample<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let sample = guard(py, || Ok(self.lock().sample()))?;
        Ok(sample.map(|sample| PyBytes::new(py, &sample)))
    }

    /// On rank 0, before `finish`: all ranks' samples of the step under way, in rank order.
    fn take_samples(&self, py: Python<'_>, rows: Vec<Vec<u8>>) -> PyResult<()> {
        guard(py, || {
            self.lock().take_samples(&rows);
            Ok(())
        })
    }

    /// Whether the step under way ends with the control message that was broadcast last: `take_control` comes before `finish`.
    fn awaits_control(&self) -> bool {
        self.lock().control.is_due()
    }

    /// Takes in the control message that is due.
    fn take_control(&self, message: Span) -> PyResult<()> {
        let message = message.read::<u8>("the control message")?;
        Ok(self.lock().control.accept(message).map_err(Failure::from)?)
    }

    /// The bucket at `index` holds the parameters with these ids.
    fn layout(&self, py: Python<'_>, index: usize, ids: Vec<u32>) -> PyResult<()> {
        guard(py, || {
            let unknown =
                |id: &u32| Failure::Run(format!("failed to lay out bucket {index}: parameter {id} is not known"));
            let find = |id: &u32| self.model.get(*id as usize).copied().ok_or_else(|| unknown(id));
            let params = ids.iter().map(find).collect::<Result<Vec<_>, _>>()?;
            Ok(self.lock().store.layout(index, params)?)
        })
    }

    /// Ends a step, after the optimizer. With a `ticket` a device has the step's times: `resolve` brings them later, and until then
    /// nothing that came after it is reported. `answers` are what all ranks answered, where that was gathered in this step.
    #[pyo3(signature = (loss=None, ticket=None, answers=None))]
    fn finish(
        &self,
        py: Python<'_>,
        loss: Option<f64>,
        ticket: Option<u64>,
        answers: Option<Vec<Vec<u8>>>,
    ) -> PyResult<Next> {
        guard(py, || {
            let foreign =
                |rank| Failure::Run(format!("failed to end a step: rank {rank}'s answer about a trial cannot be read"));
            let read = |(rank, bytes): (usize, &Vec<u8>)| Answer::decode(bytes).ok_or_else(|| foreign(rank));
            let answers = answers.iter().flatten().enumerate().map(read).collect::<Result<Vec<_>, _>>()?;
            self.lock().finish(loss, ticket, &answers)
        })
    }

    /// Why this rank had no part in an exchange of the step under way; none where it had.
    fn fault(&self) -> Option<Fault> {
        self.lock().fault.clone()
    }

    /// The times of a step that ended with this ticket; none: they will never be known, and the step is not reported.
    #[pyo3(signature = (ticket, times=None))]
    fn resolve(&self, ticket: u64, times: Option<Times>) {
        self.lock().resolve(ticket, times);
    }

    /// Seconds that the caller itself has compressed: before a collective, where backward waited for it, or after one.
    fn add_compression(&self, seconds: f64, in_hook: bool) {
        self.lock().meter.add_compression(Duration::try_from_secs_f64(seconds).unwrap_or_default(), in_hook);
    }

    /// Whether the next step needs the hook, where DDP has exchanged dense buckets by itself.
    fn wants_hook(&self) -> bool {
        self.lock().wants_hook()
    }

    /// A gradient or a loss was not finite: a running trial ends with the next iteration, on all ranks.
    fn diverged(&self) {
        self.lock().diverged = true;
    }

    /// Copies what a step changes here; one copy is kept.
    fn save(&self, py: Python<'_>) -> PyResult<()> {
        guard(py, || {
            self.lock().store.save();
            Ok(())
        })
    }

    /// Puts the copy back, bit for bit.
    fn restore(&self, py: Python<'_>) -> PyResult<()> {
        guard(py, || Ok(self.lock().store.restore()?))
    }

    /// The residuals, by parameter id, as float32 in native byte order.
    fn residuals(&self, py: Python<'_>) -> PyResult<BTreeMap<u32, Vec<u8>>> {
        guard(py, || {
            let bytes = |values: Vec<f32>| values.iter().flat_map(|v| v.to_ne_bytes()).collect();
            Ok(self.lock().store.export()?.into_iter().map(|(id, values)| (id, bytes(values))).collect())
        })
    }

    /// Replaces the residuals, float32 by parameter id, and the pipelines. Answers whether these go on: they do under the same
    /// compressor. Changes nothing when any of it does not fit.
    #[pyo3(signature = (state, pipelines=None))]
    fn set_residuals(
        &self,
        py: Python<'_>,
        state: BTreeMap<u32, Span>,
        pipelines: Option<Pipelines>,
    ) -> PyResult<bool> {
        guard(py, || {
            let take = |(id, values): (u32, Span)| Ok((id, values.read::<f32>("a saved parameter")?.to_vec()));
            let state = state.into_iter().map(take).collect::<Result<BTreeMap<_, _>, Failure>>()?;
            let session = &mut *self.lock();
            let same = |spec: &str| session.named.is_some_and(|named| named.spec.to_string() == spec);
            let pipelines = pipelines.filter(|saved| same(&saved.compressor));
            if let Some(Pipelines { buckets, .. }) = &pipelines {
                self.check_states(session, buckets)?;
            }
            session.store.import(state, &self.model)?;
            let goes_on = pipelines.is_some();
            if let Some(Pipelines { step, buckets, .. }) = pipelines {
                let now = session.next_step();
                session.named.iter_mut().for_each(|named| named.offset = step.wrapping_sub(now));
                session.store.await_pipelines(buckets);
            }
            Ok(goes_on)
        })
    }

    /// The state of the pipelines for a checkpoint; none when what the user named is not in force.
    fn pipelines(&self, py: Python<'_>) -> PyResult<Option<Pipelines>> {
        guard(py, || {
            let session = self.lock();
            let (step, version) = (session.next_step(), session.control.look().in_force().version.0);
            let Some(named) = session.named.filter(|_| version == 0) else { return Ok(None) };
            let buckets = session.store.pipelines()?;
            Ok(Some(Pipelines { compressor: named.spec.to_string(), step: step.wrapping_add(named.offset), buckets }))
        })
    }

    /// Begins shadow trials of these strategies with the next step.
    fn shadow(&self, strategies: Vec<String>) -> PyResult<()> {
        let parse = |text: &String| text.parse::<Strategy>().map_err(Failure::input);
        let strategies = strategies.iter().map(parse).collect::<Result<Vec<_>, _>>()?;
        if let Some(bad) = strategies.iter().find(|s| !Shadows::has(s)) {
            return Err(Failure::input(format!(
                "{bad} has no shadow here: dense loses nothing, and AR-Topk's shadows follow the controller's trials"
            ))
            .into());
        }
        let mut session = self.lock();
        // These are not the newest trial's, and its report is not theirs to complete.
        session.reporter.forget_trial();
        session.shadows.watch(&strategies);
        Ok(())
    }

    fn shadow_gains(&self) -> Vec<ShadowGain> {
        let gain = |(strategy, found): (Strategy, flexcomm_exchange::ShadowGain)| ShadowGain {
            strategy: strategy.to_string(),
            gain: found.gain,
            steps: found.steps,
        };
        self.lock().shadows.gains().map(gain).collect()
    }

    fn state(&self) -> State {
        let session = self.lock();
        let agreement = session.control.look();
        let in_force = agreement.in_force();
        State {
            step: agreement.step(),
            version: in_force.version.0,
            strategy: in_force.strategy.to_string(),
            in_trial: agreement.tick().trial.is_some(),
            connected: session.reporter.client().is_some_and(Client::connected),
            steps: session.steps(),
        }
    }

    /// What the step under way runs, for collectives whose shape the backend can be given.
    fn tick(&self) -> PyResult<TickPy> {
        let tick = self.lock().now()?;
        let agreed = tick.version.0 > 0 || tick.trial.is_some();
        Ok(TickPy { agreed, strategy: tick.strategy.to_string(), index: tick.index() })
    }

    /// What the newest step cost on this rank whose times are known, whatever ran.
    fn costs(&self) -> Option<Costs> {
        self.lock().last.map(|costs| Costs {
            compute: costs.compute.as_secs_f64(),
            compress: costs.comp.as_secs_f64(),
            sync: costs.sync.as_secs_f64(),
            step: costs.step.as_secs_f64(),
            sent: costs.bytes,
            gain: costs.energy.gain().clamp(LEAST_GAIN, 1.0),
        })
    }

    fn auto_leaders(&self) -> AutoLeaders {
        let auto = &self.lock().auto;
        AutoLeaders { mode: auto.mode().to_string(), skew: auto.skew(), staleness: auto.staleness() }
    }

    /// Hands the last reports to the agent and says goodbye.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        guard(py, || {
            self.lock().flush();
            Ok(())
        })
    }
}
