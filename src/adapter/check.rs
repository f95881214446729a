//! Whether an adapter fits the model whose pool it enters: every factor has a place, and the shape of it.

use crate::adapter::sites::PoolSites;
use crate::adapter::{Adapter, Factor, MAX_RANK, Site};
use crate::error::{Error, ErrorKind, Result};
use crate::placement::{ExpertShare, HeadShare, RankShare};

/// Checks `adapter` against the layers of a pool.
///
/// Errors: `Adapter`, naming the first factor that does not fit.
pub(crate) fn check(layers: &[&PoolSites], adapter: &Adapter) -> Result<()> {
    if let Some(RankShare { heads, experts }) = &adapter.share {
        let other = if layers.iter().filter_map(|layer| layer.experts()).any(|held| held != experts) {
            Some((experts_held(experts), "the experts"))
        } else if layers.iter().filter_map(|layer| layer.heads()).any(|held| held != heads) {
            Some((heads_held(heads), "attention"))
        } else {
            None
        };
        if let Some((held, what)) = other {
            let message = format!("cut for {held}, but this rank holds another part of {what}");
            return Err(Error::new(ErrorKind::Adapter, message));
        }
    }
    for factor in &adapter.factors {
        let fits = match layers.get(factor.layer) {
            Some(layer) => check_factor(layer, factor, adapter.share.is_some()),
            None => Err("the model has no such layer".to_owned()),
        };
        fits.map_err(|reason| {
            let (layer, site, expert) = factor.place();
            Error::new(ErrorKind::Adapter, format!("layer {layer} {site:?} {expert}: {reason}"))
        })?;
    }
    Ok(())
}

fn check_factor(layer: &PoolSites, f: &Factor, cut: bool) -> Result<(), String> {
    if matches!(f.site, Site::SharedGate | Site::SharedUp | Site::SharedDown | Site::SharedRouter) {
        return Err("adapters of the shared expert have no place in a layer yet".to_owned());
    }
    let Some([mut out, mut input]) = layer.shape(f.site) else {
        return Err("the layer has no such projection".to_owned());
    };
    if let Some(share) = layer.experts().filter(|_| f.site.of_expert()) {
        let experts = share.placement().experts();
        if f.expert >= experts {
            return Err(format!("expected an expert below {experts}"));
        }
        if cut && share.placement().local(f.expert).is_none() {
            return Err("expected an expert of this rank, since the adapter is cut for it".to_owned());
        }
    }
    if let Some(part) = layer.cut(f.site).filter(|_| cut) {
        *(if part.inputs { &mut input } else { &mut out }) = part.range.len();
    }
    if f.bias.is_some() && f.site == Site::Embedding {
        return Err("an embedding takes no bias".to_owned());
    }
    if let Some(bias) = &f.bias
        && [bias.rows, bias.cols] != [out, 1]
    {
        return Err(format!("expected a bias [{out}, 1], got [{}, {}]", bias.rows, bias.cols));
    }
    let fits = [f.a.rows, f.a.cols, f.b.rows, f.b.cols] == [f.rank, input, out, f.rank];
    if !fits || f.rank == 0 || f.rank > MAX_RANK {
        let got = format!("[{}, {}] and [{}, {}]", f.a.rows, f.a.cols, f.b.rows, f.b.cols);
        return Err(format!("expected A [{}, {input}] and B [{out}, {}], got {got}", f.rank, f.rank));
    }
    Ok(())
}

fn heads_held(share: &HeadShare) -> String {
    let (heads, kv) = (share.heads(), share.kv_heads());
    let all = share.all();
    format!(
        "heads {}..{} of {}, key and value heads {}..{} of {}",
        heads.start, heads.end, all.heads, kv.start, kv.end, all.kv_heads
    )
}

fn experts_held(share: &ExpertShare) -> String {
    let (width, placement) = (share.width(), share.placement());
    let (held, all) = (share.experts(), placement.experts());
    format!("{held} of {all} experts, columns {}..{} of {}", width.start, width.end, share.full_width())
}
