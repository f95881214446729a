//! A layer of a step whose tokens are sent to the ranks that hold their experts.

use crate::error::{Error, ErrorKind, Result};
use crate::exchange::Received;
use crate::kernels::combine::Combine;
use crate::kernels::pack::Reads;
use crate::kernels::{Recording, View};
use crate::layer::{LoraBatch, MoeLayer, MoeTensors, Routed};
use crate::model::step::{LayerStep, StepDispatch, StepTensors};
use crate::model::{Commands, Mlp};

impl LayerStep<'_> {
    /// Records attention of this rank's T rows, sends them to the ranks of their experts and computes what has come from all.
    /// `returned` is what this gave for the layer before: the outputs of the rows there, f32 `[T, D]`, which `hidden` still
    /// lacks. A rank without rows takes part in the exchange. `macs` are those of T rows in attention and of one row in experts.
    pub(super) fn record_dispatched(
        &self,
        commands: &mut Commands<'_>,
        rec: &mut Recording,
        dispatch: &StepDispatch,
        returned: Option<View>,
        macs: [u64; 2],
    ) -> Result<Option<View>> {
        let Self { model, weights, t, hidden, .. } = *self;
        let d = model.config.hidden;
        let mut routed = None;
        if t.rows > 0 {
            let dense = if matches!(weights.mlp, Mlp::Dense { .. }) { macs[1] * t.rows as u64 } else { 0 };
            routed = commands.pass(rec, "attention", macs[0] + dense, |rec, pass| {
                if let Some(returned) = &returned {
                    add_returned(rec, pass, t, dispatch, returned, hidden, d)?;
                }
                self.record_attention(rec, pass, true, false)?;
                match &weights.mlp {
                    Mlp::Experts(moe) => self.record_route(rec, pass, moe).map(Some),
                    Mlp::Dense { .. } => self.record_mlp(rec, pass, true, None).map(|()| None),
                }
            })?;
        }
        let Mlp::Experts(moe) = &weights.mlp else { return Ok(None) };
        let tokens = routed.as_ref().map(|(x, routed)| (x, routed));
        let received = commands.send(rec, tokens, &dispatch.adapters, [d, moe.shape.top_k])?;
        let computed = match received.rows {
            0 => None,
            _ => Some(self.record_received(commands, rec, dispatch, moe, &received, macs[1])?),
        };
        let computed = computed.as_ref().map(|y| (y, (received.rows * d * 4) as u64));
        let returned = match t.rows {
            0 => None,
            rows => Some(rec.scratch("returned", (rows * d * 4) as u64)?),
        };
        commands.give_back(rec, received, computed, returned.clone().map(|to| (to, t.rows)))?;
        Ok(returned)
    }

    /// The norm of `hidden`, f32 `[T, D]`, and the experts of its rows.
    fn record_route(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        moe: &MoeLayer,
    ) -> Result<(View, Routed)> {
        let Self { model, weights, t, hidden, .. } = *self;
        let (sites, factors) = self.pool.layer(self.layer);
        let x = rec.scratch("x", (t.rows * model.config.hidden * 4) as u64)?;
        let lora = t.lora.as_ref().map(|batch| (batch, sites, factors));
        let tensors = MoeTensors { tokens: t.rows, x: &x, out: hidden, accumulate: true, status: t.status, lora };
        // Other ranks are sent f32.
        let reads = Reads { plain: true, ..moe.router_reads(rec.gpu().capabilities(), &tensors) };
        let packed = self.norm(&weights.mlp_norm, &x).record_for(rec, pass, &reads, None)?;
        let routed = moe.route_rows(rec, pass, &tensors, packed.as_ref())?;
        Ok((x, routed))
    }

    /// The outputs of this rank's experts for R rows that have come: f32 `[R, D]`.
    fn record_received(
        &self,
        commands: &mut Commands<'_>,
        rec: &mut Recording,
        dispatch: &StepDispatch,
        moe: &MoeLayer,
        received: &Received,
        macs: u64,
    ) -> Result<View> {
        let Self { model, pool, t, .. } = *self;
        let rows = received.rows;
        let placement = model.share.experts.placement();
        let local = |id: &i32| match usize::try_from(*id) {
            Err(_) => Ok(-1),
            Ok(expert) => placement.local(expert).map(|local| local as i32).ok_or_else(|| {
                Error::new(
                    ErrorKind::Format,
                    format!("a token was sent to expert {expert}, which this rank does not hold"),
                )
            }),
        };
        let ids = received.topk_ids.iter().map(local).collect::<Result<Vec<i32>>>()?;
        let slot = |adapter: &u64| match adapter {
            0 => Ok(-1),
            id => dispatch.slots.iter().find(|(known, _)| known == id).map(|(_, slot)| *slot as i32).ok_or_else(|| {
                Error::new(
                    ErrorKind::Format,
                    format!("a token was sent with adapter {id}, which is not one of the step"),
                )
            }),
        };
        let slots = received.adapters.iter().map(slot).collect::<Result<Vec<i32>>>()?;
        let arrived = commands.arrive(rec, received, &ids, &slots)?;
        let batch = LoraBatch::of(pool, &slots, arrived.token_lora_mapping);
        let (sites, factors) = pool.layer(self.layer);
        let y = rec.scratch("dispatched y", (rows * model.config.hidden * 4) as u64)?;
        commands.pass(rec, "experts", macs * rows as u64, |rec, pass| {
            let lora = batch.as_ref().map(|batch| (batch, sites, factors));
            let tensors =
                MoeTensors { tokens: rows, x: &arrived.x, out: &y, accumulate: false, status: t.status, lora };
            moe.experts(rec, pass, &tensors, &arrived.routed)
        })?;
        Ok(y)
    }
}

/// Adds the outputs that came back, f32 `[T, D]`, to `hidden`.
pub(super) fn add_returned(
    rec: &mut Recording,
    pass: &mut wgpu::ComputePass<'_>,
    t: &StepTensors<'_>,
    dispatch: &StepDispatch,
    returned: &View,
    hidden: &View,
    width: usize,
) -> Result<()> {
    // Each row is the sum of one pair of weight 1.
    Combine {
        tokens: t.rows,
        top_k: 1,
        hidden: width,
        y: returned,
        topk_weights: &dispatch.ones,
        ids: &dispatch.zeros,
        out: hidden,
        accumulate: true,
    }
    .record(rec, pass)
}
