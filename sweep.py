import torch, sys, statistics as st, itertools, time, traceback
from affine_attn import *
from affine_attn.core import fused, epilogue
from affine_attn.core.engines import stock, sdpa
from affine_attn.core.accuracy import Shape, random_inputs, deviations
from affine_attn.core.call import checked_call
from affine_attn.measure import side_by_side
from benchmarks.cases import CUDA_SHAPES, plain_attention
from torch.nn.attention import SDPBackend
dev=torch.device('cuda')
print(torch.cuda.get_device_name(), torch.__version__, torch.backends.cudnn.version())
def graph_ms(fn, n=20, reps=5):
    s=torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        fn(); fn()
    torch.cuda.current_stream().wait_stream(s); torch.cuda.synchronize()
    g=torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for _ in range(n): fn()
    ts=[]
    for _ in range(reps):
        a,b=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)
        a.record(); g.replay(); b.record(); b.synchronize(); ts.append(a.elapsed_time(b)/n)
    return st.median(ts)
x=torch.randn(256*2**20//2,device=dev).bfloat16(); y=torch.empty_like(x)
copy=graph_ms(lambda: y.copy_(x)); bw=x.numel()*4/copy/1e9
print('copy TB/s', bw)
def call_of(x,mask=Mask()): return checked_call(**({"sink":None,"alpha":None,"beta":None,"gate":None}|x),mask=mask,scale=None)
s0=CUDA_SHAPES['3B']
inp=random_inputs(variant('affine'),s0,torch.bfloat16,dev); c=call_of(inp)
o,z=stock.forward(c.q,c.k,c.v,c.scale,True,None)
print('cudnn o stride',o.stride(),'z',z.shape,z.stride(),z.dtype)
g=stock.backward(torch.randn_like(o),c.q,c.k,c.v,o,z,c.scale,True,None); print('grads stride',[t.stride() for t in g],[t.dtype for t in g])
qq=c.q.transpose(1,2).contiguous().transpose(1,2); o2,z2=stock.forward(qq,c.k,c.v,c.scale,True,None); print('BTHD q -> o stride',o2.stride())
# correctness first
for name in ('affine','sink','off_by_one','affine_gated','gated_headwise','gated','softmax','logn'):
    for shape in (Shape(2,6,2,320,320,64),Shape(1,3,1,333,333,128),Shape(1,4,2,100,260,80)):
        x=random_inputs(variant(name),shape,torch.bfloat16,dev)
        try:
            ds=deviations('sdpa',x); print(name,shape,'ok' if all(d.within for d in ds) else [d for d in ds if not d.within])
        except Exception as e: traceback.print_exc()
x=random_inputs(variant('affine'),Shape(2,6,2,320,320,64),torch.bfloat16,dev); x['alpha']-=0.5
print('negative alpha',[d for d in deviations('sdpa',x) if not d.within] or 'ok')
def floors(s):
    q=s.batch*s.heads*s.tq*s.head_dim*2; v=s.batch*s.kv_heads*s.tk*s.head_dim*2
    return (2*q+v)/bw/1e9, (2*q+3*v)/bw/1e9
best={}
for sh in ('3B','1B','0.5B'):
    s=CUDA_SHAPES[sh]; c=call_of(random_inputs(variant('affine'),s,torch.bfloat16,dev))
    o,z=stock.forward(c.q,c.k,c.v,c.scale,True,None); dy=torch.randn_like(o); dv=torch.randn_like(c.v)
    ff,fb=floors(s); print(sh,'floor fwd %.1f us bwd %.1f us'%(ff*1e3,fb*1e3))
    for T,w in ((16,4),(32,2),(32,4),(32,8),(64,4),(64,8),(64,16),(128,8)):
        d=s.head_dim; keep=fused._TILES[d]; fused._TILES[d]=(T,w)
        try:
            out=fused.finish(c,o,z)
            f=graph_ms(lambda: fused.finish(c,o,z)); b=graph_ms(lambda: fused.gradients(c,dy,out,lambda *a:(o,dv,dv)))
            print(sh,'T',T,'w',w,'fwd %.1f us (%.0f%%) bwd %.1f us (%.0f%%)'%(f*1e3,100*ff/f,b*1e3,100*fb/b),flush=True)
            best.setdefault(d,[]).append((f+b,T,w,sh))
        except Exception as e: print(sh,T,w,'ERR',repr(e)[:200])
        fused._TILES[d]=keep
for d,l in best.items():
    tot={}
    for t,T,w,sh in l: tot.setdefault((T,w),[]).append(t)
    k=min((sum(v),k) for k,v in tot.items() if len(v)==max(map(len,tot.values())))[1]; fused._TILES[d]=k; print('best',d,k)
for sh,s in CUDA_SHAPES.items():
    fs={}
    for name in (None,'affine','sink','off_by_one','affine_gated'):
        x=random_inputs(variant(name or 'softmax'),s,torch.bfloat16,dev)
        lv={n:t.requires_grad_() if isinstance(t,torch.Tensor) else t for n,t in x.items()}; ws=[t for t in lv.values() if isinstance(t,torch.Tensor)]
        dy=torch.randn_like(lv['q'])
        if name is None:
            pa=plain_attention(SDPBackend.CUDNN_ATTENTION); fs['plain']=lambda lv=lv,ws=ws,dy=dy: torch.autograd.grad(pa(lv['q'],lv['k'],lv['v']),ws,dy)
        else: fs[name]=lambda lv=lv,ws=ws,dy=dy: torch.autograd.grad(attention(**lv,impl='sdpa'),ws,dy)
    r=side_by_side(fs,'plain',dev,rounds=7)
    print(sh,{k:(round(v.p50,3),round(v.ratio,4)) for k,v in r.items()},flush=True)
