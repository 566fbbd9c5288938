//! The class that Python sees: settings, the agent, state. Its other parts: [`crate::control`], [`crate::checkpoint`], [`crate::exchange`],
//! [`crate::dense`], [`crate::device`], [`crate::shadows_on`].

use crate::guard::{Failure, guard};
use crate::names::{candidate, compressor};
use crate::session::{Fault, Leadership, Running, Session};
use crate::telemetry::Times;
use crate::times::measure;
use flexcomm_compression::pipeline::Member;
use flexcomm_compression::{Layers, Sizes};
use flexcomm_domain::{CodecCost, Collective, Family, JobId, Strategy, default_compressors, further_compressors};
use flexcomm_exchange::{Param, Shadows, layers};
use flexcomm_trainer::{Client, LEAST_GAIN, machine_name, processor};
use flexcomm_wire::{CodecInfo, Hello};
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// One rank's side of one attached model. All methods may be called from any thread.
#[pyclass(frozen)]
pub struct Core {
    session: Mutex<Session>,
    /// All parameters.
    pub model: Vec<Param>,
}

impl Core {
    /// The session, also after a panic elsewhere: it then reports what does not fit as an error.
    pub fn lock(&self) -> MutexGuard<'_, Session> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where a session is.
#[pyclass(frozen, get_all)]
pub struct State {
    step: u64,
    version: u64,
    /// The plan in force.
    strategy: String,
    /// Whether some bucket has error feedback.
    error_feedback: bool,
    in_trial: bool,
    /// Whether the agent is there.
    connected: bool,
    /// Steps of this process.
    steps: u64,
}

/// What a bucket runs in the step under way.
#[pyclass(name = "Tick", frozen, get_all)]
pub struct TickPy {
    /// Whether the ranks agreed on it: it is a decision, or a trial's candidate.
    agreed: bool,
    strategy: String,
    /// Whether nothing is compressed.
    dense: bool,
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

/// The compressors of a job.
struct Offered {
    /// To decide among.
    candidates: Vec<Family>,
    on_request: Vec<Family>,
}

impl Offered {
    fn new(named: Option<Vec<String>>) -> Result<Self, Failure> {
        let Some(named) = named else {
            return Ok(Self { candidates: default_compressors(), on_request: further_compressors() });
        };
        let mut candidates = named.iter().map(|text| candidate(text)).collect::<Result<Vec<_>, _>>()?;
        candidates.sort();
        candidates.dedup();
        let others = default_compressors().into_iter().chain(further_compressors());
        let on_request = others.filter(|family| !candidates.contains(family)).collect();
        Ok(Self { candidates, on_request })
    }

    fn codecs(self, layers: &Layers, costs: &BTreeMap<Family, [CodecCost; 2]>) -> Vec<CodecInfo> {
        let codec = |family: Family, on_request: bool| CodecInfo {
            times: costs.get(&family).map(|costs| (*costs).into()),
            on_request,
            ..CodecInfo::new(family, Sizes::codec(family, layers))
        };
        let candidates = std::iter::once(Family::NONE).chain(self.candidates).map(|family| codec(family, false));
        candidates.chain(self.on_request.into_iter().map(|family| codec(family, true))).collect()
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
        let member = Member { rank, world, ..Member::alone(seed) };
        let mut session = Session::new(job, member, strategy, leadership, shadow_share, &model);
        session.named = spec.map(compressor).transpose()?.map(Running::of);
        Ok(Self { session: Mutex::new(session), model })
    }

    /// Starts the client of the agent behind `socket`. `collectives` are those that this backend can run; `candidates` the compressors
    /// to decide among in place of the default ones, which stay on request. What compressing takes is measured on the CUDA device of
    /// this number, if one is given. `momentum` is the optimizer's, if it has one, `policy` what the script sets for the job, as JSON, `machine` the name of
    /// its accelerator.
    #[allow(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    #[pyo3(signature = (socket, backend, collectives, candidates=None, ordinal=None, momentum=None, policy=None, machine=None))]
    fn connect(
        &self,
        py: Python<'_>,
        socket: PathBuf,
        backend: String,
        collectives: Vec<String>,
        candidates: Option<Vec<String>>,
        ordinal: Option<u32>,
        momentum: Option<f64>,
        policy: Option<&str>,
        machine: Option<&str>,
    ) -> PyResult<()> {
        guard(py, || {
            let policy = policy.map(serde_json::from_str).transpose().map_err(Failure::input)?;
            if let Some(bad) = collectives.iter().find(|c| c.parse::<Collective>().is_err()) {
                return Err(Failure::input(format!("collective {bad:?} is not known")));
            }
            let all = layers(&self.model).map_err(Failure::input)?;
            let costs = ordinal.map(|ordinal| measure(ordinal, &self.model)).unwrap_or_default();
            let codecs = Offered::new(candidates)?.codecs(&all, &costs);
            let mut session = self.lock();
            let size = (session.rank.0, session.world);
            // Buckets are known once DDP has rebuilt them: `Session::report_buckets`.
            let hello = Hello {
                run: session.run,
                momentum,
                policy,
                machine: machine.and_then(machine_name).or_else(processor),
                codecs,
                collectives,
                ..Hello::new(session.job.clone(), size, all.values() as u64, backend)
            };
            session.reporter.connect(Client::start(&socket, hello)?);
            Ok(())
        })
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

    /// Begins shadow trials of these strategies with the next step.
    fn shadow(&self, strategies: Vec<String>) -> PyResult<()> {
        let parse = |text: &String| text.parse::<Strategy>().map_err(Failure::input);
        let strategies = strategies.iter().map(parse).collect::<Result<Vec<_>, _>>()?;
        if let Some(bad) = strategies.iter().find(|s| !Shadows::has(s)) {
            return Err(Failure::input(format!(
                "'{bad}' has no shadow here: dense loses nothing, and AR-Topk's shadows, which need samples of all ranks, \
                 follow the controller's trials; give its compressor by allgather, for example 'topk@0.01/allgather'"
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
            strategy: in_force.plan.to_string(),
            error_feedback: in_force.plan.strategies().iter().any(|strategy| strategy.spec().memory().is_some()),
            in_trial: agreement.tick().trial.is_some(),
            connected: session.reporter.client().is_some_and(Client::connected),
            steps: session.steps(),
        }
    }

    /// What a bucket runs in the step under way, for collectives whose shape the backend can be given.
    fn tick(&self, index: usize) -> PyResult<TickPy> {
        let tick = self.lock().now()?;
        let agreed = tick.version.0 > 0 || tick.trial.is_some();
        let (strategy, dense) = (tick.strategy(index).to_string(), tick.strategy(index).is_dense());
        Ok(TickPy { agreed, strategy, dense, index: tick.index() })
    }

    /// What the newest step cost on this rank whose times are known, whatever ran.
    fn costs(&self) -> Option<Costs> {
        self.lock().last.as_ref().map(|costs| Costs {
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
